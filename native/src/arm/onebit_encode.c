/* onebit_encode.c - 1-bit codes, class means and the new residual; onebit_groups.c walks the
 * groups. */
#include "internal.h"

#if defined(GC_NEON)
#include "common.h"
#include "onebit_groups.h"

enum { VECTORS_NUMEL = 16 };

/* Bits of |g| seen and the largest |x|. */
typedef struct {
    uint32x4_t any_gradient, absmax;
} watch;

/* Sixteen lanes of a block's two class sums, lanes 2j and 2j + 1 in vector j. */
typedef struct {
    float64x2_t zeros[8], ones[8];
} class_lanes;

GC_INLINE void add2(class_lanes *lanes, int j, float64x2_t d)
{
    /* A -0.0 changes no lane: none is ever -0.0. */
    lanes->ones[j] = vaddq_f64(lanes->ones[j], vmaxq_f64(d, vdupq_n_f64(0)));
    lanes->zeros[j] = vaddq_f64(lanes->zeros[j], vminq_f64(d, vdupq_n_f64(0)));
}

/* Elements of the lanes from 2j on. */
GC_INLINE void add8(class_lanes *lanes, int j, gc_eight x)
{
    add2(lanes, j, vcvt_f64_f32(vget_low_f32(x.a)));
    add2(lanes, j + 1, vcvt_high_f64_f32(x.a));
    add2(lanes, j + 2, vcvt_f64_f32(vget_low_f32(x.b)));
    add2(lanes, j + 3, vcvt_high_f64_f32(x.b));
}

/* Bits of eight elements. */
GC_INLINE uint8_t bits8(gc_eight x)
{
    static const uint8_t weights[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    uint16x8_t is_one = vcombine_u16(vmovn_u32(vcgtzq_f32(x.a)), vmovn_u32(vcgtzq_f32(x.b)));
    return vaddv_u8(vand_u8(vmovn_u16(is_one), vld1_u8(weights)));
}

/* Take in eight elements of the lanes from 2j on: stage x and its bits, add x to the sums. */
GC_INLINE void take8(watch *seen, class_lanes *lanes, int j, gc_onebit_stage *stage, uint32_t i,
                     gc_eight g, gc_eight x)
{
    gc_put8(stage->x + i, x);
    stage->bits[i / 8] = bits8(x);
    seen->any_gradient = vorrq_u32(seen->any_gradient, vorrq_u32(gc_abs4(g.a), gc_abs4(g.b)));
    seen->absmax = gc_abs_max8(seen->absmax, x);
    add8(lanes, j, x);
}

/* Fewer than sixteen elements, padded with zeros. */
GC_INLINE void take_rest(watch *seen, class_lanes *lanes, gc_onebit_stage *stage,
                         const gc_onebit_view *view, uint32_t chunk, uint32_t i, uint32_t numel,
                         int dtype)
{
    float g[VECTORS_NUMEL] = {0}, x[VECTORS_NUMEL] = {0};
    for (uint32_t j = 0; i + j < numel; j++) {
        g[j] = gc_load(view->src, dtype, view->data + chunk + i + j);
        x[j] = view->residual ? g[j] + view->residual[chunk + i + j] : g[j];
    }
    take8(seen, lanes, 0, stage, i, gc_load8(g, GC_F32, 0), gc_load8(x, GC_F32, 0));
    take8(seen, lanes, 4, stage, i + 8, gc_load8(g, GC_F32, 8), gc_load8(x, GC_F32, 8));
}

GC_INLINE void take_body(gc_onebit_totals *totals, gc_onebit_stage *stage,
                         const gc_onebit_view *view, uint32_t chunk, uint32_t numel, int dtype)
{
    watch seen = {vdupq_n_u32(0), vdupq_n_u32(0)};
    for (uint32_t block = 0; block < numel; block += GC_BLOCK_NUMEL) {
        uint32_t end = numel - block < GC_BLOCK_NUMEL ? numel : block + GC_BLOCK_NUMEL, i = block;
        class_lanes lanes;
        for (int j = 0; j < 8; j++)
            lanes.zeros[j] = lanes.ones[j] = vdupq_n_f64(0);
        for (; i + VECTORS_NUMEL <= end; i += VECTORS_NUMEL)
            for (uint32_t h = 0; h < VECTORS_NUMEL; h += 8) {
                gc_eight g = gc_load8(view->src, dtype, view->data + chunk + i + h), x = g;
                if (view->residual)
                    x = gc_plus8(g, gc_load8(view->residual, GC_F32, chunk + i + h));
                take8(&seen, &lanes, (int)h / 2, stage, i + h, g, x);
            }
        if (i < end)
            take_rest(&seen, &lanes, stage, view, chunk, i, end, dtype);
        totals->sums[0] += gc_total16(lanes.zeros);
        totals->sums[1] += gc_total16(lanes.ones);
    }
    uint32_t absmax = vmaxvq_u32(seen.absmax);
    totals->absmax_bits = absmax > totals->absmax_bits ? absmax : totals->absmax_bits;
    totals->any_gradient |= vmaxvq_u32(seen.any_gradient);
    totals->ones += gc_finish_bits(stage, numel);
}

static void take(gc_onebit_totals *totals, gc_onebit_stage *stage, const gc_onebit_view *view,
                 uint32_t chunk, uint32_t numel)
{
    GC_BY_DTYPE(view->dtype, take_body(totals, stage, view, chunk, numel, GC_F32),
                take_body(totals, stage, view, chunk, numel, GC_BF16),
                take_body(totals, stage, view, chunk, numel, GC_F16));
}

/* r' = decay * (x - q) for four elements; the magnitudes of x - q are added to `all`. */
GC_INLINE float32x4_t left4(float32x4_t x, const gc_onebit_view *view, float32x4_t *all)
{
    float32x4_t left = vsubq_f32(
        x, vbslq_f32(vcgtzq_f32(x), vdupq_n_f32(view->means[1]), vdupq_n_f32(view->means[0])));
    *all = vaddq_f32(*all, vabsq_f32(left));
    return vmulq_n_f32(left, view->decay);
}

GC_INLINE gc_eight left8(gc_eight x, const gc_onebit_view *view, float32x4_t *all)
{
    return (gc_eight){left4(x.a, view, all), left4(x.b, view, all)};
}

/* One element of a tail. */
GC_INLINE float left1(float x, const gc_onebit_view *view, double *all)
{
    float left = x - view->means[x > 0];
    *all += left < 0 ? -left : left;
    return view->decay * left;
}

static double leave_staged(const gc_onebit_stage *stage, const gc_onebit_view *view, uint32_t numel,
                           float *out, int streams)
{
    (void)streams;
    float32x4_t sums = vdupq_n_f32(0);
    uint32_t i = 0;
    for (; i + 8 <= numel; i += 8)
        gc_put8(out + i, left8(gc_load8(stage->x, GC_F32, i), view, &sums));
    double all = vaddvq_f32(sums);
    for (; i < numel; i++)
        out[i] = left1(stage->x[i], view, &all);
    return all;
}

GC_INLINE double leave_body(const gc_onebit_view *view, uint32_t numel, float *out, int dtype)
{
    float32x4_t sums = vdupq_n_f32(0);
    uint32_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        gc_eight x = gc_load8(view->src, dtype, view->data + i);
        if (view->residual)
            x = gc_plus8(x, gc_load8(view->residual, GC_F32, i));
        gc_put8(out + i, left8(x, view, &sums));
    }
    double all = vaddvq_f32(sums);
    for (; i < numel; i++) {
        float g = gc_load(view->src, dtype, view->data + i),
              x = view->residual ? g + view->residual[i] : g;
        out[i] = left1(x, view, &all);
    }
    return all;
}

static double leave_again(const gc_onebit_view *view, uint32_t numel, float *out)
{
    GC_BY_DTYPE(view->dtype, return leave_body(view, numel, out, GC_F32),
                return leave_body(view, numel, out, GC_BF16),
                return leave_body(view, numel, out, GC_F16));
}

void gc_onebit_encode_neon(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_onebit_tier tier = {take, leave_staged, leave_again};
    gc_encode_onebit_groups(job, segment, &tier);
}
#endif
