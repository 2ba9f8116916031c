"""The viewer: a build as one HTML file that needs nothing else, with one cursor through all of its pictures.

`build_data.document` gathers what the page shows as data, `html_page.assemble` puts data, scripts and styles into one file.
What the page prints is what ``explain --json`` says: it holds that document, and makes no figure of its own that the document
has.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from tapestry.cli.outcome import Outcome, bar


def view(args: argparse.Namespace) -> Outcome:
    """``tapestry view``: a build, or two beside each other, as one HTML file."""
    from tapestry.build import store
    from tapestry.build.atomic import write_text
    from tapestry.tools.viewer import saved

    folders = [f for f in (args.build, args.other) if f is not None]
    output = args.output or Path(f"{args.build.resolve().name}.html")
    for folder in folders:
        store.check_beside(folder, output)
    with bar(args, "view") as advance:
        page = saved.page(folders, args.trace, lambda what: advance(None, None, what))
    write_text(output, page)
    if args.open:
        webbrowser.open(output.resolve().as_uri())
    document = {"page": str(output), "bytes": len(page.encode()), "builds": [str(f) for f in folders]}
    return Outcome(document, lambda: print(f"{output}: {document['bytes']:,} bytes, for any browser, offline"))
