"""Puts an object in another one's place in every module of FastDeploy that holds it, under whatever name.

Modules that ran `from … import name` before have a binding of their own, and some import under an alias. So modules are
searched for the object, not for its name.
"""

import sys


def replace(original, replacement):
    """Returns the places, as "module.name"."""
    places = []
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "fastdeploy":
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)
                places.append(f"{module_name}.{name}")
    return places
