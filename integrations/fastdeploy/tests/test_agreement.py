"""A fork that is patched and has the plugin: folio_backend.h and selection.py give the same answers in every environment."""

import os
import shlex
import subprocess

import pytest
from paddle_devices import cpu_only

pytestmark = cpu_only

HERE = os.path.dirname(os.path.abspath(__file__))
VARIABLES = ("FD_ATTENTION_BACKEND", "FD_FOLIO_BACKEND", "FD_FOLIO_PREFER")
NAMES = ["", "NATIVE_ATTN", "APPEND_ATTN", "MLA_ATTN", "DSA_ATTN", "FLASH_ATTN", "FLASH_MASK_ATTN", "TRITON_MLA_ATTN",
         "DECODE_UNIFIED_ATTN", "FOLIO_ATTN", "FOLIO_MLA_ATTN", "unheard_of"]
LATENT = ("MLA_ATTN", "TRITON_MLA_ATTN", "FOLIO_MLA_ATTN")


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """header(): the line that a process of this environment gets of folio_backend.h."""
    program = tmp_path_factory.mktemp("header") / "answers"
    flags = subprocess.run(["pkg-config", "--cflags", "folio"], check=True, capture_output=True, text=True).stdout
    subprocess.run(["c++", "-std=c++17", f"-I{HERE}/..", *shlex.split(flags), f"{HERE}/answers.cpp", "-o", str(program), "-ldl"],
                   check=True)
    return lambda: subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()


def set_environment(monkeypatch, *values):
    for name, value in zip(VARIABLES, values):
        monkeypatch.setenv(name, value)


def plugin():
    """The same line of the plugin."""
    from folio_fastdeploy import selection

    name, preferred = selection.requested(), selection.preferred()
    latent = (name or os.environ["FD_ATTENTION_BACKEND"]) in LATENT
    return f"{'latent' if latent else 'keys'} {'folio' if name else 'prefer' if preferred else 'host'} {int(bool(name))}"


@pytest.mark.parametrize("prefer", ["", "1", "0"])
@pytest.mark.parametrize("inherited", ["", "FOLIO_ATTN", "FOLIO_MLA_ATTN", "MLA_ATTN"])
def test_both_answer_alike(load, monkeypatch, header, inherited, prefer):
    load()
    for name in NAMES:
        set_environment(monkeypatch, name, inherited, prefer)
        assert header() == plugin(), name


@pytest.mark.parametrize("name", ["FOLIO_ATTN", "FOLIO_MLA_ATTN"])
def test_the_header_sees_folio_after_the_plugin_has_answered(load, monkeypatch, header, name):
    """The plugin leaves FastDeploy's name in FD_ATTENTION_BACKEND; a fork's kernels ask later, in this process or a child."""
    set_environment(monkeypatch, name, "", "")
    before = header()
    load(FD_ATTENTION_BACKEND=name)
    assert os.environ["FD_ATTENTION_BACKEND"] != name
    assert header() == before == f"{'latent' if name in LATENT else 'keys'} folio 1"


def test_both_refuse_a_wrong_name(load, monkeypatch, header):
    load()
    set_environment(monkeypatch, "FOLIO_MLA", "", "")
    with pytest.raises(ValueError) as refusal:
        plugin()
    for sentence in (str(refusal.value), header()):
        assert sentence.startswith("FD_ATTENTION_BACKEND is FOLIO_MLA; the names that are known are ")
        assert all(name in sentence for name in ("APPEND_ATTN", "TRITON_MLA_ATTN", "FOLIO_ATTN", "FOLIO_MLA_ATTN"))
