"""The viewer: a build as one HTML file that needs nothing else, with one cursor through all of its pictures.

`build_data.document` gathers what the page shows as data, `html_page.assemble` puts data, scripts and styles into one file.
What the page prints is what ``explain --json`` says: it holds that document, and makes no figure of its own that the document
has.
"""
