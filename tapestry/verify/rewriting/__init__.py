"""Proofs of rewrites: what a graph said before and after one, compared by code that no rule shares.

`regions` finds what changed, cone by cone; `footprints` compares dependences by isl, `normal_form` composed expressions,
`cells` values at cells of the output, computed on demand from drawn inputs (`draws`); `proofs` says what was shown, and how.
`rewrite_log` writes the steps of a build as text and reads them back.
"""
