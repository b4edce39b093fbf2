"""The command line: one function per command."""

from maple.cli.app import main
