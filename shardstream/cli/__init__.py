"""The command line: ``shardstream pack|reshard|merge|index|verify|ls|cat|view|bench``."""

from shardstream.cli.app import command_tree as command_tree
from shardstream.cli.app import main as main
from shardstream.cli.options import describe_options as describe_options
from shardstream.cli.options import load_function as load_function
from shardstream.cli.terminal import describe as describe
from shardstream.cli.write_shards import parse_split as parse_split
