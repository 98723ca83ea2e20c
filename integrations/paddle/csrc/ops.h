// Where the ops of each file are given to Python. Names of pybind functions are folio_<op>, those of registered ops are
// static_op_folio_<op>: FastDeploy's own are loaded beside them, and Paddle ends the process at two ops of one name.
// Suffixes _v1, _v2 and _v3 stand for older signatures, from those of FastDeploy 2.1 on; the plugin says which is whose.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace folio_paddle {

void bind_mla(pybind11::module_ &module);
void bind_step(pybind11::module_ &module);
void bind_append(pybind11::module_ &module);
void bind_decode(pybind11::module_ &module);
void bind_ragged(pybind11::module_ &module);

/** Shapes and types that registered ops say in static graphs. */
using Shapes = std::vector<std::vector<int64_t>>;

}  // namespace folio_paddle
