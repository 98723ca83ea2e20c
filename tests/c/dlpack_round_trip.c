/* folio_dlpack.h against this machine's dlpack.h: every field survives the way there and back. */
#include "expect.h"
#include <folio/folio_dlpack.h>

int main(void)
{
    char memory[64];
    int64_t shape[2] = { 2, 3 }, strides[2] = { 8, 1 };
    folio_tensor there, back;
    DLTensor between;
    memset(&there, 0, sizeof there);
    there.data = memory;
    there.device_type = FOLIO_DEVICE_CUDA;
    there.device_id = 3;
    there.ndim = 2;
    there.dtype = FOLIO_BFLOAT16;
    there.shape = shape;
    there.strides = strides;
    there.byte_offset = 16;

    between = folio_to_dlpack(&there);
    EXPECT(between.data == memory && between.device.device_type == kDLCUDA && between.device.device_id == 3);
    EXPECT(between.ndim == 2 && between.shape == shape && between.strides == strides && between.byte_offset == 16);
    EXPECT(between.dtype.code == kDLBfloat && between.dtype.bits == 16 && between.dtype.lanes == 1);

    back = folio_from_dlpack(&between);
    EXPECT(back.data == there.data && back.device_type == there.device_type && back.device_id == there.device_id);
    EXPECT(back.ndim == there.ndim && back.shape == there.shape && back.strides == there.strides);
    EXPECT(memcmp(&back.dtype, &there.dtype, sizeof back.dtype) == 0 && back.byte_offset == there.byte_offset);
    return 0;
}
