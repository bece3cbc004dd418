"""The command line: ``shardstream pack|index|verify|ls|cat``."""

from shardstream.cli.app import main

__all__ = ["main"]
