/* Smoke: what a first program does works, by the plain functions and by the table alike. */
#include "problem.h"
#include <math.h>

/* Attention of one head in double precision. */
static void attend(const problem *p, int head, double *o, double *lse)
{
    double sum = 0;
    int d, j;
    for (d = 0; d < HEAD_DIM; d++)
        o[d] = 0;
    for (j = 0; j < KEYS; j++) {
        int at = (p->slots_data[j] * HEADS + head) * HEAD_DIM;
        double logit = 0, weight;
        for (d = 0; d < HEAD_DIM; d++)
            logit += (double)p->q_data[head * HEAD_DIM + d] * p->k_data[at + d];
        weight = exp(logit / sqrt((double)HEAD_DIM));
        sum += weight;
        for (d = 0; d < HEAD_DIM; d++)
            o[d] += weight * p->v_data[at + d];
    }
    for (d = 0; d < HEAD_DIM; d++)
        o[d] /= sum;
    *lse = log(sum);
}

static void versions_and_names(void)
{
    const folio_api *api = folio_get_api(FOLIO_ABI_VERSION);
    EXPECT(api != NULL);
    EXPECT(api->abi_version == FOLIO_ABI_VERSION);
    EXPECT(api->struct_size >= sizeof(folio_api));
    EXPECT(FOLIO_API_HAS(api, merge_states));
    EXPECT(strcmp(api->version(), folio_version()) == 0);
    EXPECT(atoi(folio_version()) == FOLIO_ABI_MAJOR);
    EXPECT(api->decode_run == folio_decode_run && api->prefill_plan == folio_prefill_plan);
    EXPECT(folio_get_api(FOLIO_ABI_VERSION + (1u << 16)) == NULL);

    EXPECT(strcmp(folio_status_name(FOLIO_OK), "OK") == 0);
    EXPECT(strcmp(folio_status_name(FOLIO_ERR_SHAPE), "SHAPE") == 0);
    EXPECT(strcmp(folio_status_name(-7), "unknown") == 0);
    EXPECT(folio_device_count(FOLIO_DEVICE_CPU) == 1);
    EXPECT(folio_device_count(77) == 0);
}

static void decode_is_right(void)
{
    folio_error err = FOLIO_INIT(folio_error);
    folio_context *ctx = open_cpu(2);
    float o[HEADS * HEAD_DIM], lse[HEADS];
    folio_decode *decode;
    problem p;
    int h, d;
    make_problem(&p, 1);
    decode = planned_decode(ctx, &p);
    EXPECT(folio_decode_kernel(decode) != NULL);
    folio_context_destroy(ctx); /* the handle keeps what it needs */
    expect_ok(run_decode(decode, &p, o, lse, &err), &err);
    for (h = 0; h < HEADS; h++) {
        double want[HEAD_DIM], want_lse;
        attend(&p, h, want, &want_lse);
        for (d = 0; d < HEAD_DIM; d++)
            EXPECT(fabs(o[h * HEAD_DIM + d] - want[d]) < 1e-5);
        EXPECT(fabs(lse[h] - want_lse) < 1e-5);
    }
    folio_decode_destroy(decode);
    free(p.workspace);
}

int main(void)
{
    versions_and_names();
    decode_is_right();
    return 0;
}
