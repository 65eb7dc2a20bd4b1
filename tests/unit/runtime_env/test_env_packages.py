import io
import os
import stat
import zipfile

import pytest

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env import packages
from miniray.runtime_env import scan as scan_module
from miniray.runtime_env.scan import IgnoreRules, scan


class Blobs(dict):
    """The cluster's packages, and how often each was put."""

    puts = 0

    def put(self, uri, content):
        self.puts += 1
        self[uri] = content

    def has(self, uri):
        return uri in self


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(members):
    return [member.name for member in members]


def zip_of(**entries):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, text in entries.items():
            made.writestr(name, text)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("pattern", "path", "ignored"),
    [
        ("*.bin", "a/b/model.bin", True),
        ("*.bin", "a/b/model.bind", False),
        ("/data", "data", True),
        ("/data", "a/data", False),
        ("a/data", "a/data", True),
        ("a/data", "b/a/data", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("**/logs", "x/y/logs", True),
        ("logs/**", "logs/today", True),
        ("a*c", "a/c", False),
        ("fil?.py", "file.py", True),
        ("[a-c].txt", "b.txt", True),
        ("[!a-c].txt", "b.txt", False),
        ("\\#note", "#note", True),
        ("#note", "#note", False),
        ("end  ", "end", True),
    ],
)
def test_ignore_patterns_mean_what_git_means(pattern, path, ignored):
    assert bool(IgnoreRules([pattern]).decide(path, is_folder=False)) is ignored


def test_a_pattern_that_ends_in_a_slash_ignores_folders_only():
    rules = IgnoreRules(["build/"])
    assert rules.decide("build", is_folder=True)
    assert not rules.decide("build", is_folder=False)


def test_a_later_pattern_takes_back_an_earlier_one():
    rules = IgnoreRules(["*.txt", "!keep.txt"])
    assert rules.decide("other.txt", is_folder=False) is True
    assert rules.decide("keep.txt", is_folder=False) is False


def test_a_folder_is_packed_without_history_and_compiled_files(tmp_path):
    write(tmp_path, {"a.py": "", "b/c.py": "", ".git/HEAD": "", "b/__pycache__/c.pyc": ""})
    assert names(scan(tmp_path)) == ["a.py", "b/", "b/c.py"]


def test_excludes_and_ignore_files_leave_files_out(tmp_path):
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n",
            "sub/.gitignore": "!kept.log\n",
            "a.py": "",
            "x.log": "",
            "sub/kept.log": "",
            "data/big": "",
        },
    )
    assert names(scan(tmp_path, ["/data", ".gitignore"])) == ["a.py", "sub/", "sub/kept.log"]


def test_links_are_followed_but_not_in_circles_nor_into_nothing(tmp_path):
    code = write(tmp_path / "code", {"a.py": "A = 1"})
    write(tmp_path / "shared", {"s.py": "S = 1"})
    (code / "shared").symlink_to(tmp_path / "shared")
    (code / "loop").symlink_to(code)
    (code / "gone").symlink_to(tmp_path / "nowhere")
    members = scan(code)
    assert names(members) == ["a.py", "shared/", "shared/s.py"]
    with zipfile.ZipFile(io.BytesIO(packages.pack(members))) as packed:
        assert packed.read("shared/s.py") == b"S = 1"


def test_pipes_and_sockets_are_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert scan(tmp_path) == []


def test_what_has_too_many_files_is_refused_where_it_is_packed_and_unpacked(tmp_path, monkeypatch):
    for number in range(5):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / f"{number}").touch()
    monkeypatch.setattr(scan_module, "MAX_PACKAGE_ENTRIES", 5)
    with pytest.raises(RuntimeEnvSetupError, match=r"more than 5 files .* many \(6\)"):
        scan(tmp_path)
    monkeypatch.setattr(packages, "MAX_PACKAGE_ENTRIES", 1)
    with pytest.raises(RuntimeEnvSetupError, match="has 2 entries; a package may hold 1"):
        packages.unpack(zip_of(a="", b=""), tmp_path, "The package")


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(tmp_path):
    (tmp_path / "small.py").write_bytes(b"x" * 10)
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(300 * 2**20)  # no bytes are written or read
    with pytest.raises(RuntimeEnvSetupError, match=r"250 MiB(.|\n)*300.0 MiB  weights.bin"):
        scan(tmp_path)


def test_a_folder_that_can_not_be_listed_is_refused_by_name(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RuntimeEnvSetupError, match=f"{tmp_path}.*Permission denied"):
        scan(tmp_path)


def test_the_same_files_give_the_same_bytes_whenever_they_were_written(tmp_path):
    one = write(tmp_path / "one", {"b.py": "B", "a.py": "A"})
    two = write(tmp_path / "two", {"a.py": "A", "b.py": "B"})
    os.utime(two / "a.py", (1, 1))
    assert packages.pack(scan(one)) == packages.pack(scan(two))


def test_unpacking_gives_back_contents_folders_and_the_right_to_execute(tmp_path):
    code = write(tmp_path / "code", {"run.sh": "#!/bin/sh", "deep/er/x.txt": "x"})
    (code / "run.sh").chmod(0o755)
    (code / "empty").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    packages.unpack(packages.pack(scan(code)), target, "it")
    assert (target / "deep/er/x.txt").read_text() == "x"
    assert (target / "empty").is_dir()
    assert os.access(target / "run.sh", os.X_OK)
    assert not os.access(target / "deep/er/x.txt", os.X_OK)


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "..\\evil"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(RuntimeEnvSetupError, match="leads out"):
        packages.unpack(zip_of(**{"ok": "", name: "evil"}), target, "The package")
    assert list(target.iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_an_archive_with_a_symbolic_link_is_refused(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        made.writestr(info, "/etc/passwd")
    with pytest.raises(RuntimeEnvSetupError, match="symbolic link"):
        packages.unpack(buffer.getvalue(), tmp_path, "The package")


def test_an_archive_that_would_unpack_to_too_much_is_refused_before_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "MAX_PACKAGE_BYTES", 999)
    with pytest.raises(RuntimeEnvSetupError, match="when unpacked"):
        packages.unpack(zip_of(a="x" * 1000), tmp_path, "The package")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_archive_is_refused(tmp_path):
    with pytest.raises(RuntimeEnvSetupError, match="not a zip archive"):
        packages.check(b"nonsense", "The package")
    content = bytearray(zip_of(a="hello world"))
    content[content.index(b"hello")] ^= 0xFF
    with pytest.raises(RuntimeEnvSetupError, match="can't be unpacked"):
        packages.unpack(bytes(content), tmp_path, "The package")


def test_a_wheel_is_unpacked_with_the_modules_of_its_data_folder(tmp_path):
    wheel = zip_of(**{"top.py": "", "x-1.data/purelib/pkg/inner.py": "", "x-1.data/scripts/s": ""})
    packages.unpack_wheel(wheel, tmp_path, "The wheel")
    assert (tmp_path / "top.py").exists()
    assert (tmp_path / "pkg/inner.py").exists()


def test_uploading_replaces_paths_by_addresses_of_content(tmp_path):
    code = write(tmp_path / "code", {"main.py": "print()", "big.bin": "0"})
    module = write(tmp_path / "pkg", {"__init__.py": "", "x.py": ""})
    single = write(tmp_path, {"single.py": "S = 1"}) / "single.py"
    blobs = Blobs()
    spec = {
        "working_dir": str(code),
        "py_modules": [str(module), str(single)],
        "excludes": ["*.bin"],
        "env_vars": {"A": "1"},
    }
    uploaded = packages.upload(spec, blobs.put, blobs.has)
    assert set(uploaded) == {"working_dir", "py_modules", "env_vars"}
    held = [
        zipfile.ZipFile(io.BytesIO(blobs[uri])).namelist()
        for uri in [uploaded["working_dir"], *uploaded["py_modules"]]
    ]
    assert held == [["main.py"], ["pkg/__init__.py", "pkg/x.py"], ["single.py"]]
    assert all(packages.package_uri(content) == uri for uri, content in blobs.items())
    assert packages.upload(uploaded, blobs.put, blobs.has) == uploaded


def test_an_unchanged_folder_is_neither_read_nor_uploaded_again(tmp_path, monkeypatch):
    code = write(tmp_path / "code", {"main.py": "one"})
    blobs = Blobs()
    first = packages.upload({"working_dir": str(code)}, blobs.put, blobs.has)
    monkeypatch.setattr(packages, "pack", lambda members: pytest.fail("packed again"))
    assert packages.upload({"working_dir": str(code)}, blobs.put, blobs.has) == first
    assert blobs.puts == 1


def test_a_changed_file_gives_a_new_address(tmp_path):
    code = write(tmp_path / "code", {"main.py": "one"})
    blobs = Blobs()
    first = packages.upload({"working_dir": str(code)}, blobs.put, blobs.has)
    write(code, {"main.py": "other"})
    assert packages.upload({"working_dir": str(code)}, blobs.put, blobs.has) != first


def test_a_package_that_another_cluster_lacks_is_uploaded_there_too(tmp_path):
    code = write(tmp_path / "code", {"main.py": "one"})
    old, new = Blobs(), Blobs()
    first = packages.upload({"working_dir": str(code)}, old.put, old.has)
    assert packages.upload({"working_dir": str(code)}, new.put, new.has) == first
    assert list(new) == list(old)


def test_wheels_and_archives_are_uploaded_as_they_are(tmp_path):
    content = zip_of(a="x")
    (tmp_path / "w.whl").write_bytes(content)
    (tmp_path / "z.zip").write_bytes(content)
    blobs = Blobs()
    spec = {"py_modules": [str(tmp_path / "w.whl"), str(tmp_path / "z.zip")]}
    uploaded = packages.upload(spec, blobs.put, blobs.has)
    assert [uri.rpartition(".")[2] for uri in uploaded["py_modules"]] == ["whl", "zip"]
    assert set(blobs.values()) == {content}


def test_an_archive_that_nodes_would_refuse_is_refused_on_the_driver(tmp_path):
    (tmp_path / "z.zip").write_bytes(zip_of(**{"../evil": ""}))
    with pytest.raises(RuntimeEnvSetupError, match="leads out"):
        packages.upload({"working_dir": str(tmp_path / "z.zip")}, Blobs().put, Blobs().has)
