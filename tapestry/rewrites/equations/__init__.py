"""Rules that are equations: a text with the IR before and after, sizes, bodies and projections left open.

`pattern` reads the text, `match` finds it in a graph, `conditions` asks what stands under ``when:``, `build` writes the
right-hand side, `instances` makes random graphs of it, and `equation` is the rule that comes out. docs/grammar.md has the
grammar; the ``.tap`` files here are the built-in rules of this kind.
"""
