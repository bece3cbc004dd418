"""Put the modules of shardstream.webdataset in the place of webdataset's, as docs/webdataset.md does."""

import sys

import shardstream.webdataset

for name, module in list(sys.modules.items()):
    if name.startswith(shardstream.webdataset.__name__):
        sys.modules[name.removeprefix("shardstream.")] = module
