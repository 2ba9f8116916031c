"""Tokens of IR text and of rule texts, and errors that point at one: file, line, column and what was expected there."""

from __future__ import annotations

import re

WIDTH = 100  # characters of a line that an error shows on either side of its place
TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>\d+\.\d+(?:[eE][+-]?\d+)?|\d+\.(?!\.)|\d+[eE][+-]?\d+|\d+)"""
    r"""|(?P<group>[A-Za-z_][A-Za-z0-9_]*\.\.(?![A-Za-z0-9_.]))|(?P<ident>[A-Za-z_][A-Za-z0-9_.]*)"""
    r"""|(?P<punct>=>|>=|<=|==|!=|//|[\[\](){}<>,:=|*/+;-])"""
)
