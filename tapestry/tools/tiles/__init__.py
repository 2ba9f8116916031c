"""``tapestry tiles``: start, stop and size of every tile of a tensor, and what another tiling moves."""
