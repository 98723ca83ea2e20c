"""FastDeploy's own Python out of a checkout, in a process without a GPU: FASTDEPLOY_SOURCE is the checkout's folder.

The platform is CUDA's. What the checkout imports and this Python does not have is stood in for by modules whose attributes take
anything. Compiled ops do nothing; they have the signatures that the checkout's sources declare.
"""

import abc
import glob
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
import types

import paddle

ROOT = os.environ.get("FASTDEPLOY_SOURCE") and os.path.abspath(os.environ["FASTDEPLOY_SOURCE"])
BUILT = "fastdeploy.model_executor.ops.gpu."  # the folder of what FastDeploy's build makes


class Anything(abc.ABCMeta):
    """The type of classes that have every attribute, may be derived from, called and looked into, and do nothing."""

    def __new__(meta, name, bases=(), body=None, **options):
        return super().__new__(meta, name, bases, METHODS if body is None else body)

    def __init__(cls, name, bases=(), body=None, **options):
        super().__init__(name, bases, body or {})

    def __getattr__(cls, name):
        return anything(name)

    def __iter__(cls):
        return iter(())

    def __contains__(cls, key):
        return False

    def __setitem__(cls, key, value):
        pass

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name)


METHODS = {
    "__init__": lambda self, *args, **options: None,
    "__call__": lambda self, decorated=None, *args, **options: decorated,
    "__getattr__": lambda self, name: anything(name),
    "__class_getitem__": lambda key: Anything("of"),
    "__setitem__": lambda self, key, value: None,
}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, after all others, what FastDeploy imports and what lies below that."""

    def __init__(self):
        self.names = set()

    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top == "fastdeploy":
            if not name.startswith(BUILT):
                return None
        elif top not in self.names and (name != top or not self.asked_by_fastdeploy()):
            return None
        self.names.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def asked_by_fastdeploy(self):
        frame = sys._getframe(2)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame.f_globals.get("__name__", "").startswith("fastdeploy")

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = anything
        return module

    def exec_module(self, module):
        module.__path__ = ["absent"]


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


def declared(text, function):
    """The types of a C++ function's parameters, as pybind11 would document them: only what is a tensor is told apart."""
    parameters = re.search(rf"\b{function}\(((?:[^()]|\([^()]*\))*)\)\s*;", text)
    if parameters is None:
        return None
    parts = re.sub(r"<[^<>]*>", lambda inner: inner[0].replace(",", ""), parameters[1]).split(",")
    return ["paddle::Tensor" if "Tensor" in part else "int" for part in parts if part.strip()]


def bound_ops():
    """{name: types of its parameters, or None} of the functions that pybind11 binds."""
    with open(os.path.join(ROOT, "custom_ops/gpu_ops/cpp_extensions.cc")) as file:
        text = without_comments(file.read())
    return {name: declared(text, function) for name, function in re.findall(r'm\.def\(\s*"(\w+)",\s*&(\w+)', text)}


def registered_ops():
    """{name: names of its parameters} of the ops that Paddle registers."""
    found = {}
    for path in glob.glob(os.path.join(ROOT, "custom_ops/gpu_ops/**/*.c[cu]"), recursive=True):
        with open(path, errors="ignore") as file:
            text = without_comments(file.read())
        for name, body in re.findall(r"PD_BUILD_STATIC_OP\(\s*(\w+)\s*\)(.*?);", text, re.S):
            parts = [re.search(rf"\.{part}\(\s*\{{(.*?)\}}\s*\)", body, re.S) for part in ("Inputs", "Attrs")]
            found[name] = [one for part in parts if part for one in re.findall(r'"(\w+)\s*(?::[^"]*)?"', part[1])]
    return found


def bound(name, kinds):
    def function(*args):
        return f"FastDeploy's {name}"

    parameters = ", ".join(f"arg{i}: {kind}" for i, kind in enumerate(kinds or []))
    function.__doc__ = f"{name}({parameters}) -> object\n" if kinds else None
    return function


def registered(parameters):
    def function(*args):
        return None

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(one, kind) for one in parameters])
    return function


def compiled_ops():
    """The module that FastDeploy's build makes."""
    module = types.ModuleType(BUILT + "fastdeploy_ops")
    vars(module).update({name: bound(name, kinds) for name, kinds in bound_ops().items()})
    vars(module).update({"static_op_" + name: registered(names) for name, names in registered_ops().items()})
    return module


ABSENT = Absent()


def forget():
    """Takes FastDeploy and all that stands in for something out of the process."""
    for name in [name for name in sys.modules if name.partition(".")[0] in {"fastdeploy", "folio_fastdeploy", *ABSENT.names}]:
        del sys.modules[name]
    ABSENT.names.clear()


def start(monkeypatch):
    """Makes `import fastdeploy` mean the checkout, until the test's end."""
    forget()
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, ABSENT])
    monkeypatch.setitem(sys.modules, BUILT + "fastdeploy_ops", compiled_ops())
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    hopper = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=0, name="")
    monkeypatch.setattr(paddle.device.cuda, "get_device_properties", lambda *args: hopper)
