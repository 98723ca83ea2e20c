/**
 * @file folio_dlpack.h
 * Conversions between DLPack's DLTensor and folio_tensor, for hosts that have DLPack.
 *
 * It includes the host's own <dlpack/dlpack.h> and checks at compile time that the two structs agree in
 * size, offsets and numbers. Nothing is copied but the description: data, shape and strides stay the
 * owner's, and must live as long as a folio_tensor is used. Needs C11 or C++11.
 */

#ifndef FOLIO_FOLIO_DLPACK_H
#define FOLIO_FOLIO_DLPACK_H

#include <dlpack/dlpack.h>
#include <folio/folio.h>

/** Fails to compile where the two structs differ. */
#ifdef __cplusplus
#define FOLIO_DLPACK_AGREE(condition) static_assert(condition, "folio_tensor and DLTensor differ: " #condition)
#else
#define FOLIO_DLPACK_AGREE(condition) _Static_assert(condition, "folio_tensor and DLTensor differ: " #condition)
#endif

FOLIO_DLPACK_AGREE(sizeof(DLTensor) == sizeof(folio_tensor));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, data) == offsetof(folio_tensor, data));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, device.device_type) == offsetof(folio_tensor, device_type));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, device.device_id) == offsetof(folio_tensor, device_id));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, ndim) == offsetof(folio_tensor, ndim));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, dtype) == offsetof(folio_tensor, dtype));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, shape) == offsetof(folio_tensor, shape));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, strides) == offsetof(folio_tensor, strides));
FOLIO_DLPACK_AGREE(offsetof(DLTensor, byte_offset) == offsetof(folio_tensor, byte_offset));
FOLIO_DLPACK_AGREE(sizeof(DLDataType) == sizeof(folio_dtype));
FOLIO_DLPACK_AGREE(offsetof(DLDataType, code) == offsetof(folio_dtype, code));
FOLIO_DLPACK_AGREE(offsetof(DLDataType, bits) == offsetof(folio_dtype, bits));
FOLIO_DLPACK_AGREE(offsetof(DLDataType, lanes) == offsetof(folio_dtype, lanes));
FOLIO_DLPACK_AGREE((int)kDLCPU == FOLIO_DEVICE_CPU);
FOLIO_DLPACK_AGREE((int)kDLCUDA == FOLIO_DEVICE_CUDA);
FOLIO_DLPACK_AGREE((int)kDLCUDAHost == FOLIO_DEVICE_CUDA_HOST);
FOLIO_DLPACK_AGREE((int)kDLInt == 0 && (int)kDLUInt == 1 && (int)kDLFloat == 2 && (int)kDLBfloat == 4);

#undef FOLIO_DLPACK_AGREE

/** Describes a DLTensor's memory to Folio; shape and strides are borrowed. */
static inline folio_tensor folio_from_dlpack(const DLTensor *from)
{
    folio_tensor to;
    to.data = from->data;
    to.device_type = (int32_t)from->device.device_type;
    to.device_id = from->device.device_id;
    to.ndim = from->ndim;
    to.dtype.code = from->dtype.code;
    to.dtype.bits = from->dtype.bits;
    to.dtype.lanes = from->dtype.lanes;
    to.shape = from->shape;
    to.strides = from->strides;
    to.byte_offset = from->byte_offset;
    return to;
}

/** Describes a folio_tensor's memory to DLPack; shape and strides are borrowed. */
static inline DLTensor folio_to_dlpack(const folio_tensor *from)
{
    DLTensor to;
    to.data = from->data;
    to.device.device_type = (DLDeviceType)from->device_type;
    to.device.device_id = from->device_id;
    to.ndim = from->ndim;
    to.dtype.code = from->dtype.code;
    to.dtype.bits = from->dtype.bits;
    to.dtype.lanes = from->dtype.lanes;
    to.shape = from->shape;
    to.strides = from->strides;
    to.byte_offset = from->byte_offset;
    return to;
}

#endif /* FOLIO_FOLIO_DLPACK_H */
