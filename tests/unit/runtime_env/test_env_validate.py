import pickle
import sys
import types

import pytest

from miniray.runtime_env import RuntimeEnv, RuntimeEnvConfig
from miniray.runtime_env.validate import merge, validate

URI = f"mrpkg://{'a' * 64}.zip"


@pytest.mark.parametrize(
    "key", ["conda", "container", "image_uri", "uv", "nsight", "py_executable"]
)
def test_a_key_of_ray_that_is_not_supported_is_refused_by_name_with_what_is(key):
    with pytest.raises(ValueError, match=rf"does not support runtime_env\['{key}'\].*env_vars"):
        validate({key: "something"})


def test_a_misspelt_key_is_refused_with_the_keys_that_exist():
    with pytest.raises(ValueError, match=r"no key 'env_var'.*env_vars, working_dir"):
        validate({"env_var": {}})


def test_a_variable_that_is_no_string_is_refused_with_its_name_and_value():
    with pytest.raises(TypeError, match=r"'THREADS' is given 4 \(int\)"):
        validate({"env_vars": {"THREADS": 4}})


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_a_variable_whose_name_the_system_can_not_hold_is_refused(name):
    with pytest.raises(ValueError, match="env_vars"):
        validate({"env_vars": {name: "x"}})


def test_empty_keys_count_as_absent():
    assert validate({"env_vars": {}, "pip": [], "py_modules": [], "working_dir": None}) == {}


def test_a_relative_working_dir_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    assert validate({"working_dir": "code"}) == {"working_dir": str(tmp_path / "code")}


def test_a_working_dir_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        validate({"working_dir": str(tmp_path / "missing")})


def test_a_working_dir_that_is_a_file_other_than_zip_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"folder or a \.zip"):
        validate({"working_dir": tmp_path / "a.txt"})


def test_a_remote_address_is_refused_and_an_uploaded_one_accepted():
    with pytest.raises(ValueError, match="Download it first"):
        validate({"working_dir": "s3://bucket/code.zip"})
    assert validate({"working_dir": URI, "py_modules": [URI]}) == {
        "working_dir": URI,
        "py_modules": [URI],
    }


def test_py_modules_takes_folders_files_and_imported_modules(tmp_path):
    import email

    (tmp_path / "one.py").touch()
    (tmp_path / "package").mkdir()
    modules = [tmp_path / "one.py", str(tmp_path / "package"), email, types]
    assert validate({"py_modules": modules}) == {
        "py_modules": [
            str(tmp_path / "one.py"),
            str(tmp_path / "package"),
            email.__path__[0],
            types.__file__,
        ]
    }


def test_a_module_without_a_file_is_refused_by_name():
    with pytest.raises(ValueError, match="'sys'"):
        validate({"py_modules": [sys]})


def test_py_modules_that_is_one_string_is_refused():
    with pytest.raises(TypeError, match="must be a list"):
        validate({"py_modules": "package"})


@pytest.mark.parametrize(
    "pip", [["numpy", "six==1.16", "numpy"], {"packages": ["numpy", "six==1.16"]}]
)
def test_pip_has_one_form_however_it_is_written(pip):
    assert validate({"pip": pip}) == {
        "pip": {"packages": ["numpy", "six==1.16"], "pip_check": False}
    }


def test_validating_twice_changes_nothing(tmp_path):
    once = validate({"pip": ["six"], "working_dir": tmp_path, "config": {}, "excludes": ["*.bin"]})
    assert validate(once) == once


def test_a_requirements_file_is_read_with_what_it_includes(tmp_path):
    (tmp_path / "base.txt").write_text("six\n")
    (tmp_path / "requirements.txt").write_text(
        "# first\n-r base.txt\nnumpy \\\n  >=1.26  # why\n\n-c limits.txt\n--find-links=wheels\n"
    )
    assert validate({"pip": str(tmp_path / "requirements.txt")})["pip"]["packages"] == [
        "six",
        "numpy    >=1.26",
        f"-c {tmp_path / 'limits.txt'}",
        f"--find-links {tmp_path / 'wheels'}",
    ]


def test_requirements_files_that_include_each_other_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("-r b.txt\n")
    (tmp_path / "b.txt").write_text("-r a.txt\n")
    with pytest.raises(ValueError, match="include each other"):
        validate({"pip": str(tmp_path / "a.txt")})


def test_relative_paths_in_pip_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pip = ["./src", "tiny-1.0-py3-none-any.whl[extra]", "-e .", "six @ https://host/six.whl"]
    assert validate({"pip": pip})["pip"]["packages"] == [
        str(tmp_path / "src"),
        f"{tmp_path / 'tiny-1.0-py3-none-any.whl'}[extra]",
        f"-e {tmp_path}",
        "six @ https://host/six.whl",
    ]


def test_a_requirement_in_place_of_a_list_is_explained():
    with pytest.raises(ValueError, match=r"Give a list.*\['numpy'\]"):
        validate({"pip": "numpy"})


@pytest.mark.parametrize(
    ("pip", "error", "message"),
    [
        ({"package": ["six"]}, ValueError, "no field 'package'"),
        ({"pip_check": True}, ValueError, "'packages'"),
        ({"packages": ["six"], "pip_check": "yes"}, TypeError, "pip_check"),
        ({"packages": ["six"], "pip_version": 24}, TypeError, "pip_version"),
        ([1], TypeError, "strings only"),
    ],
)
def test_a_wrong_pip_entry_is_refused_by_field(pip, error, message):
    with pytest.raises(error, match=message):
        validate({"pip": pip})


@pytest.mark.parametrize("timeout", [0, -2])
def test_a_setup_timeout_that_is_no_duration_is_refused(timeout):
    with pytest.raises(ValueError, match="-1 for no limit"):
        validate({"config": {"setup_timeout_seconds": timeout}})


def test_a_setup_timeout_of_another_type_is_refused():
    with pytest.raises(TypeError, match="whole number"):
        RuntimeEnvConfig(setup_timeout_seconds="10")  # type: ignore[arg-type]


def test_a_runtime_env_is_a_dict_with_checked_keys(tmp_path):
    env = RuntimeEnv(working_dir=tmp_path, env_vars={"A": "1"}, config=RuntimeEnvConfig())
    assert env["working_dir"] == str(tmp_path)
    assert env["config"] == {"setup_timeout_seconds": 600, "eager_install": True}
    with pytest.raises(TypeError):
        env.set("env_vars", ["A"])
    with pytest.raises(ValueError, match="conda"):
        RuntimeEnv(conda="env")


def test_setting_an_empty_value_removes_the_key():
    env = RuntimeEnv(pip=["six"])
    env["pip"] = []
    assert env == {}


def test_a_runtime_env_can_be_unpickled_where_its_paths_do_not_exist(tmp_path):
    (tmp_path / "code").mkdir()
    blob = pickle.dumps(RuntimeEnv(working_dir=tmp_path / "code"))
    (tmp_path / "code").rmdir()
    copy = pickle.loads(blob)
    assert type(copy) is RuntimeEnv
    assert copy.to_dict() == {"working_dir": str(tmp_path / "code")}


def test_a_child_overrides_keys_and_merges_variables():
    parent = {"env_vars": {"A": "1", "B": "1"}, "pip": {"packages": ["six"]}, "working_dir": URI}
    child = {"env_vars": {"B": "2"}, "pip": {"packages": ["numpy"]}}
    assert merge(parent, child) == {
        "env_vars": {"A": "1", "B": "2"},
        "pip": {"packages": ["numpy"]},
        "working_dir": URI,
    }
    assert parent["env_vars"] == {"A": "1", "B": "1"}


def test_merging_nothing_gives_nothing():
    assert merge(None, None) == {}
    assert merge(None, {"working_dir": URI}) == merge({"working_dir": URI}, None)
