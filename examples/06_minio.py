"""Read from MinIO, or any other S3 server, configured by environment variables.

You learn: which variables to set, and that nothing else changes. The S3 client reads them itself:

    export AWS_ENDPOINT_URL=http://127.0.0.1:9000
    export AWS_ACCESS_KEY_ID=minioadmin AWS_SECRET_ACCESS_KEY=minioadmin AWS_DEFAULT_REGION=us-east-1
    python examples/06_minio.py

Without AWS_ENDPOINT_URL the example starts its own server. `docs/minio.md` has a compose file for MinIO.
"""

from __future__ import annotations

import argparse
import os
import uuid
from contextlib import nullcontext

import numpy as np
import s3fs
from embedded_s3 import embedded_s3

import shardstream as ss


def write(url: str) -> None:
    """Write 200 small images to a bucket."""
    rng = np.random.default_rng(0)
    with ss.ShardWriter(url + "/{shard:04d}.tar", max_samples=50) as writer:
        for number in range(200):
            picture = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            writer.write({"__key__": f"{number:04d}", "png": picture, "cls": number})


def main() -> None:
    """Write to the server and read back, configured by the environment and by arguments."""
    parser = argparse.ArgumentParser(description="Write to an S3 server, and read back.")
    parser.add_argument("--bucket", default="shardstream-example", help="made if it is not there")
    args = parser.parse_args()
    given = os.environ.get("AWS_ENDPOINT_URL")
    with nullcontext() if given else embedded_s3(args.bucket):
        print("server:", os.environ["AWS_ENDPOINT_URL"])
        s3 = s3fs.S3FileSystem()
        if not s3.exists(args.bucket):
            s3.mkdir(args.bucket)
        url = f"s3://{args.bucket}/{uuid.uuid4().hex}"
        try:
            write(url)
            dataset = ss.ShardDataset(url, shuffle=True).decode("rgb8").to_tuple("png", "cls")
            loader = ss.ShardLoader(dataset, batch_size=20, num_workers=2)
            labels = [label for _, batch in loader for label in batch.tolist()]
            assert sorted(labels) == list(range(200))
            print(f"{len(labels)} samples from {url}, each once")

            # The same with arguments, which override the environment: for example for two servers in one program.
            options = {
                "key": os.environ["AWS_ACCESS_KEY_ID"],
                "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
                "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
            }
            assert len(ss.ShardDataset(f"{url}/{{0000..0003}}.tar", storage_options=options)) == 200

            # An error message names the action to take.
            try:
                ss.ShardDataset(f"s3://{args.bucket}/no-such-prefix/")
            except ss.errors.NotFoundError as error:
                print("a wrong prefix:", error)
            else:
                raise AssertionError("something was found")
        finally:
            s3.rm(url, recursive=True)


if __name__ == "__main__":
    main()
