"""Objects on an S3 server: parts, ranges, lost connections, and what cannot be repeated."""

import hashlib
import json
import sys
import threading

import numpy as np
import pytest

from tests.helpers.s3_server import BUCKET
from tests.helpers.waiting import wait_until
from verl_mg.errors import UserError
from verl_mg.stores.bucket import Bucket, StoreError
from verl_mg.stores.folders import SUMS, StoredFile, UnreadableError
from verl_mg.stores.objects import MANIFEST, ObjectFolders
from verl_mg.stores.records import run_folders
from verl_mg.stores.url import ObjectUrl

MIB = 2**20
CONTENT = np.random.default_rng(0).bytes(11 * MIB)  # three parts of at most five MiB


@pytest.fixture
def bucket(s3, request) -> Bucket:
    return Bucket(ObjectUrl(BUCKET, request.node.name), part_bytes=5 * MIB, first_wait_s=0.1)


def test_object_in_parts_with_a_killed_server_is_repeated_and_named(bucket, s3, tmp_path, caplog):
    with s3.lost_at("partNumber=2"):
        # Blocks do not end where parts do.
        written = bucket.put("folder/large", [CONTENT[:7], memoryview(CONTENT)[7 : 6 * MIB], b"", CONTENT[6 * MIB :]])
    assert written == StoredFile(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    lost = f"job.output: lost the connection at {bucket.url}/folder/large ("
    assert lost in caplog.text and "; attempt 2 of 9 in 0.1 s" in caplog.text
    assert bucket.fetch("folder/large", tmp_path / "file", len(CONTENT)) == written
    assert (tmp_path / "file").read_bytes() == CONTENT and bucket.sizes("folder") == {"folder/large": len(CONTENT)}
    bucket.remove(["folder/large", "folder/absent"])
    assert bucket.sizes() == {}
    with pytest.raises(FileNotFoundError):
        bucket.read("folder/large")


@pytest.mark.nightly
def test_object_whose_parts_the_store_forgets_is_written_again(bucket, s3):
    s3.hold("partNumber=2")

    def forget() -> None:
        wait_until(s3.is_holding)
        Bucket(bucket.url).abort_uploads()
        s3.release()

    thread = threading.Thread(target=forget)
    thread.start()
    bucket.put("large", [CONTENT])
    thread.join()
    assert bucket.sizes() == {"large": len(CONTENT)}


def test_lost_store_and_unknown_bucket_are_errors_of_one_line(bucket, monkeypatch):
    with pytest.raises(StoreError, match=r"^s3://no-such-bucket/a: The specified bucket does not exist$"):
        Bucket(ObjectUrl("no-such-bucket", "a")).sizes()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    lost = Bucket(bucket.url, attempts=2, first_wait_s=0.01)
    with pytest.raises(StoreError, match=rf"^{bucket.url}/a: the connection was lost in 2 attempts: EndpointConn"):
        lost.put("a", [b"b"])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match=rf"^{bucket.url}/a: NoCredentialsError: Unable to locate credentials$"):
        Bucket(bucket.url).put("a", [b"b"])


def test_objects_that_a_store_does_not_remove_are_an_error(bucket):
    bucket.put("kept", [b"a"])
    bucket.put("other", [b"b"])
    denied = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [denied]})
    bucket._system.call_s3("put_bucket_policy", Bucket=BUCKET, Policy=policy)
    try:
        with pytest.raises(StoreError, match=rf"^{bucket.url}/kept: not removed \(Access Denied\)$"):
            bucket.remove(["kept", "other"])
    finally:
        bucket._system.call_s3("delete_bucket_policy", Bucket=BUCKET)
    bucket.remove(["kept", "other"])
    assert bucket.sizes() == {}


def test_records_are_fetched_without_names_that_are_no_files_of_the_folder(bucket, tmp_path):
    outside = tmp_path / "outside"
    # The first two are what the console of S3 makes of folders.
    for name in ("", "samples/", "samples/../../../outside", str(outside), "status.json"):
        bucket.put(name, [b"{}\n" if name == "status.json" else b""])
    with run_folders([str(bucket.url)]) as (folder,):
        assert [path.name for path in folder.rglob("*")] == ["status.json"]
        assert not (folder.parent.parent / "outside").exists() and not outside.exists()


@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff", b'{"a": 3}', b'{"a": ["b", Infinity]}'])
def test_manifest_that_is_none_is_an_error_of_one_line(bucket, tmp_path, content):
    bucket.put(f"000001/{MANIFEST}", [content])
    with pytest.raises(StoreError) as caught:
        ObjectFolders(bucket, tmp_path).open("000001").file("a")
    assert str(caught.value).startswith(f"{bucket.url}/000001/{MANIFEST}: not a manifest (")


def test_folder_that_is_written_again_is_read_again(bucket, tmp_path):
    folders = ObjectFolders(bucket, tmp_path)
    for content in (b"first", b"second"):
        folders.commit("000001", {"a": folders.write("000001", "a", [content])})
        assert folders.open("000001").file("a").read_bytes() == content


def test_folder_of_a_lost_store_is_unreadable_and_not_damaged(bucket, tmp_path, monkeypatch):
    folders = ObjectFolders(bucket, tmp_path / "first")
    written = folders.write("000001", "a", [b"content"])
    folders.commit("000001", {"a": written})
    known = folders.open("000001")
    assert known.problem_of(SUMS, known._manifest[SUMS].sha256) == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    lost = Bucket(bucket.url, attempts=2, first_wait_s=0.01)
    fresh, known._bucket = ObjectFolders(lost, tmp_path / "second").open("000001"), lost
    for folder, name in ((fresh, MANIFEST), (known, "a")):
        remedy = r"the connection was lost in 2 attempts: .*\. Start again when the store can be read\."
        with pytest.raises(UnreadableError, match=rf"^{bucket.url}/000001/{name}: {remedy}$"):
            folder.problem_of("a", written.sha256)


def test_store_without_its_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"^job.output=s3://runs/a: S3 needs the package s3fs \(.*\)\. Install verl-mg"):
        Bucket(ObjectUrl("runs", "a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gs://bucket/a",
            "gs:// has not been tested. Write a local folder, or one on S3 such as s3://BUCKET/runs/first",
        ),
        ("hdfs://host:9000/a", "hdfs:// has not been tested"),
        ("S3://bucket/a", "S3:// has not been tested"),
        ("s3://bucket", "it names no folder of a bucket"),
        ("s3:/bucket/a", "it names no folder of a bucket"),
        ("s3://bucket/a/../b", "it names no folder of a bucket"),
        ("s3://key:secret@bucket/a", "it names no folder of a bucket"),
        ("s3://bucket/a?token=1", "it names no folder of a bucket"),
        ("s3://bucket/my runs", "it names no folder of a bucket, or with characters"),
    ],
)
def test_parse_of_another_store_or_a_malformed_url_raises(text, message):
    with pytest.raises(ValueError) as caught:
        ObjectUrl.parse(text)
    assert str(caught.value).startswith(message)


def test_parse_reads_urls_and_leaves_paths():
    assert ObjectUrl.parse("s3://bucket/runs/first/") == ObjectUrl("bucket", "runs/first")
    assert [ObjectUrl.parse(text) for text in ("runs/first", "/a:b/c", "C:\\runs", "a:b")] == [None] * 4
