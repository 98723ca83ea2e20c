"""The patch for a fork: it applies to files that have the lines of its hunks, and what is Python of it does what it says."""

import enum
import os
import re
import subprocess

import pytest
from paddle_devices import cpu_only

pytestmark = cpu_only

PATCH = os.path.join(os.path.dirname(__file__), "..", "fastdeploy.patch")


@pytest.fixture
def fork(tmp_path):
    """Files of FastDeploy's names with nothing but the lines that the patch shows, the patch applied."""
    with open(PATCH) as patch:
        parts = re.split(r"^--- a/", patch.read(), flags=re.M)[1:]
    for part in parts:
        name, rest = part.split("\n", 1)
        lines = []
        for hunk in re.split(r"^@@.*@@.*\n", rest, flags=re.M)[1:]:
            lines += [line[1:] for line in hunk.splitlines() if not line.startswith("+")] + [""]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines[:-1]) + "\n")
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", os.path.abspath(PATCH)], cwd=tmp_path, env=environment, check=True)
    return tmp_path


def test_both_names_are_backends_on_both_platforms(fork):
    base = (fork / "fastdeploy/platforms/base.py").read_text()
    cuda = (fork / "fastdeploy/platforms/cuda.py").read_text()
    for name in ("FOLIO_ATTN", "FOLIO_MLA_ATTN"):
        assert f"    {name} = enum.auto()\n" in base and f"selected_backend == _Backend.{name}:" in cuda

    module = {"Platform": object}
    exec((fork / "fastdeploy/platforms/cpu.py").read_text(), module)
    backends = enum.Enum("_Backend", ["APPEND_ATTN", "FOLIO_ATTN", "FOLIO_MLA_ATTN"])
    chosen = [module["CPUPlatform"].get_attention_backend_cls(backend) for backend in [None, *backends]]
    assert chosen == ["", "", "folio_fastdeploy.backends.FolioAttentionBackend",
                      "folio_fastdeploy.backends.FolioMLAAttentionBackend"]
    assert all(path in cuda for path in chosen[2:])


def test_the_library_is_opened_by_what_is_linked(fork):
    """folio_backend.h calls dlopen; the headers of Folio are found by both compilers; libfolio itself is not linked."""
    setup = (fork / "custom_ops/setup_ops.py").read_text()
    arguments = re.search(r"extra_link_args=(\[.*?\])", setup)[1]
    assert "-ldl" in eval(arguments) and "folio" not in arguments
    assert setup.count('"-Ithird_party/folio/include"') == 2


def test_variables_of_folio_are_fastdeploys(fork, monkeypatch):
    """As module attributes of envs, with the defaults that the plugin and the header have."""
    module = {"os": os}
    exec("variables = {" + (fork / "fastdeploy/envs.py").read_text() + "}", module)
    for name, default, value in [("FD_FOLIO_PREFER", "0", "1"), ("FOLIO_LIBRARY", None, "/a/libfolio.so")]:
        monkeypatch.delenv(name, raising=False)
        assert module["variables"][name]() == default
        monkeypatch.setenv(name, value)
        assert module["variables"][name]() == value


def test_backends_are_exported_where_fastdeploys_are(fork, load):
    """When they are asked for: the plugin imports FastDeploy's backends from the same module."""
    load()
    text = (fork / "fastdeploy/model_executor/layers/attention/__init__.py").read_text()
    module = {"__name__": "attention"}
    exec(text[text.index("def __getattr__"):], module)
    from folio_fastdeploy import backends

    assert module["__getattr__"]("FolioAttentionBackend") is backends.FolioAttentionBackend
    assert module["__getattr__"]("FolioMLAAttentionBackend") is backends.FolioMLAAttentionBackend
    with pytest.raises(AttributeError, match="module 'attention' has no attribute 'Nothing'"):
        module["__getattr__"]("Nothing")


@pytest.mark.parametrize("file, attribute", [("fastdeploy/config.py", "use_mla_cache"),
                                             ("fastdeploy/worker/gpu_model_runner.py", "mla_cache")])
@pytest.mark.parametrize("name, before, latent", [("FOLIO_MLA_ATTN", False, True), ("MLA_ATTN", True, True),
                                                  ("FOLIO_ATTN", False, False), ("APPEND_ATTN", False, False)])
def test_names_of_latent_caches(fork, file, attribute, name, before, latent):
    """Beside those that FastDeploy's own line, which differs from version to version, has found."""
    class Space:
        FD_ATTENTION_BACKEND = name

    this = Space()
    setattr(this, attribute, before)
    line = re.search(rf"self\.{attribute} = .*", (fork / file).read_text())[0]
    exec(line, {"self": this, "envs": Space})
    assert getattr(this, attribute) is latent
