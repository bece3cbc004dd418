"""Test that a change whose response was lost is made once, whatever another writer did before it was noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import s3fs

import shardstream as ss
from shardstream.storage import Storage
from shardstream.versions import next_version, publish_version
from tests.servers import S3Server
from tests.small_datasets import numbered


class Overtaken(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs is not typed
    """A server whose response to the first change of ``index.json`` is lost, after which another writer changes the file."""

    other = ""
    is_lost = True

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        response = await super()._call_s3(method, *arguments, **options)
        if "IfMatch" in options and options["Key"].endswith("index.json") and self.is_lost:
            self.is_lost = False
            mine = json.loads(options["Body"])
            version = mine["dataset_version"]
            folder = options["Key"].rpartition("/")[0]
            if self.other == "tag":
                version |= {"tags": {"paper": version["number"]}}
            elif self.other == "delete":
                await self.put(options["Bucket"], f"{folder}/versions/000002.json", options["Body"])
                version |= {"number": 3, "writer": "other", "kept": [[1, 2]]}
            if self.other:
                await self.put(options["Bucket"], options["Key"], json.dumps(mine).encode())
            raise ConnectionResetError("lost")
        return response

    async def put(self, bucket: str, key: str, body: bytes) -> None:
        await super()._call_s3("put_object", Bucket=bucket, Key=key, Body=body)


@pytest.mark.usefixtures("s3_env")
@pytest.mark.parametrize("other", ["", "tag", "delete"])
def test_a_change_whose_response_was_lost_is_made_once(
    other: str, bucket: str, s3: S3Server
) -> None:
    url = numbered(f"{bucket}/data", 20, 10)
    filesystem = Overtaken(skip_instance_cache=True, **s3.storage_options)
    filesystem.other = other
    publish_version(
        url, Storage(filesystem=filesystem), lambda manifest: next_version(manifest, "append")
    )
    assert not filesystem.is_lost
    versions = ss.versions.log(url)
    assert [one.operation for one in versions].count("append") == (2 if other == "delete" else 1)
    assert len(versions) == (3 if other == "delete" else 2)
    assert versions[0].tags == (["paper"] if other == "tag" else [])
