/* block_encode.c - evenly spaced levels with error feedback; blocks.c walks the groups. */
#include "internal.h"

#if defined(GC_NEON)
#include "blocks.h"
#include "common.h"

enum { VECTORS_NUMEL = 16, EMIT_NUMEL = 32 };

/* Bits of |g| seen, and the largest |x| or sixteen lanes of a block's sum of squares, lanes 2j and
 * 2j + 1 in vector j. */
typedef struct {
    uint32x4_t any_gradient, absmax;
    float64x2_t lanes[8];
} watch;

GC_INLINE void add2(watch *seen, int j, float64x2_t d)
{
    /* the product is exact: fused or not is the same */
    seen->lanes[j] = vfmaq_f64(seen->lanes[j], d, d);
}

/* Take in eight elements of the lanes from 2j on. */
GC_INLINE void take8(watch *seen, int j, float *stage, gc_eight g, gc_eight x, int squares)
{
    gc_put8(stage, x);
    seen->any_gradient = vorrq_u32(seen->any_gradient, vorrq_u32(gc_abs4(g.a), gc_abs4(g.b)));
    if (!squares) {
        seen->absmax = gc_abs_max8(seen->absmax, x);
    } else {
        add2(seen, j, vcvt_f64_f32(vget_low_f32(x.a)));
        add2(seen, j + 1, vcvt_high_f64_f32(x.a));
        add2(seen, j + 2, vcvt_f64_f32(vget_low_f32(x.b)));
        add2(seen, j + 3, vcvt_high_f64_f32(x.b));
    }
}

/* The elements of the group from `at` on; those past `numel` are 0. */
GC_INLINE void take_rest(watch *seen, float *stage, const gc_block_view *view, uint32_t at,
                         uint32_t numel, int dtype, int squares)
{
    float g[VECTORS_NUMEL] = {0}, x[VECTORS_NUMEL] = {0};
    for (uint32_t j = 0; j < numel; j++) {
        g[j] = gc_load(view->src, dtype, view->data + at + j);
        x[j] = view->residual ? g[j] + view->residual[at + j] : g[j];
    }
    take8(seen, 0, stage, gc_load8(g, GC_F32, 0), gc_load8(x, GC_F32, 0), squares);
    take8(seen, 4, stage + 8, gc_load8(g, GC_F32, 8), gc_load8(x, GC_F32, 8), squares);
}

GC_INLINE void take_body(gc_block_totals *totals, float *staged, const gc_block_view *view,
                         uint32_t first, uint32_t numel, int dtype, int squares)
{
    watch seen = {vdupq_n_u32(0), vdupq_n_u32(0), {vdupq_n_f64(0)}};
    uint32_t i = 0;
    for (; i + VECTORS_NUMEL <= numel; i += VECTORS_NUMEL)
        for (uint32_t h = 0; h < VECTORS_NUMEL; h += 8) {
            gc_eight g = gc_load8(view->src, dtype, view->data + first + i + h), x = g;
            if (view->residual)
                x = gc_plus8(g, gc_load8(view->residual, GC_F32, first + i + h));
            take8(&seen, (int)h / 2, staged + i + h, g, x, squares);
        }
    if (i < numel)
        take_rest(&seen, staged + i, view, first + i, numel - i, dtype, squares);
    if (squares)
        gc_add_squares(totals, gc_total16(seen.lanes));
    uint32_t absmax = vmaxvq_u32(seen.absmax);
    totals->absmax_bits = absmax > totals->absmax_bits ? absmax : totals->absmax_bits;
    totals->any_gradient |= vmaxvq_u32(seen.any_gradient);
}

static void take(gc_block_totals *totals, float *staged, const gc_block_view *view, uint32_t first,
                 uint32_t numel)
{
    if (view->bits == 2)
        GC_BY_DTYPE(view->dtype, take_body(totals, staged, view, first, numel, GC_F32, 1),
                    take_body(totals, staged, view, first, numel, GC_BF16, 1),
                    take_body(totals, staged, view, first, numel, GC_F16, 1));
    else
        GC_BY_DTYPE(view->dtype, take_body(totals, staged, view, first, numel, GC_F32, 0),
                    take_body(totals, staged, view, first, numel, GC_BF16, 0),
                    take_body(totals, staged, view, first, numel, GC_F16, 0));
}

/* ---- codes ----------------------------------------------------------------------------------- */
/* Codes of four elements in the lowest bytes of the lanes; what they leave to `left`. */
GC_INLINE uint32x4_t emit4(float32x4_t x, const gc_block_levels *levels, float32x4_t *left,
                           int ternary)
{
    if (ternary) {
        uint32x4_t above = vcgtq_f32(x, vdupq_n_f32(levels->half)),
                   below = vcltq_f32(x, vdupq_n_f32(-levels->half));
        uint32x4_t up = vreinterpretq_u32_f32(vdupq_n_f32(levels->scale));
        uint32x4_t down = vreinterpretq_u32_f32(vdupq_n_f32(-levels->scale));
        *left = vsubq_f32(
            x, vreinterpretq_f32_u32(vorrq_u32(vandq_u32(above, up), vandq_u32(below, down))));
        return vaddq_u32(vsubq_u32(below, above), vdupq_n_u32(1));
    }
    const float32x4_t magic = vdupq_n_f32(GC_ROUNDING_MAGIC), zero = vdupq_n_f32(levels->zero);
    float32x4_t t = vaddq_f32(vmulq_n_f32(x, levels->inverse), zero);
    t = vminq_f32(vmaxq_f32(t, vdupq_n_f32(0)), vdupq_n_f32(levels->top));
    t = vaddq_f32(t, magic);
    float32x4_t code = vsubq_f32(t, magic); /* exact */
    *left = vsubq_f32(x, vmulq_n_f32(vsubq_f32(code, zero), levels->scale));
    return vreinterpretq_u32_f32(t);
}

/* Codes of sixteen elements, a byte each; with `out`, what they leave, decayed, whose magnitudes
 * are added to `all`. */
GC_INLINE uint8x16_t emit16(const float *x, const gc_block_levels *levels, float decay, float *out,
                            float32x4_t *all, int ternary)
{
    uint32x4_t codes[4];
    for (int j = 0; j < 4; j++) {
        float32x4_t left;
        codes[j] = emit4(vld1q_f32(x + 4 * j), levels, &left, ternary);
        if (out) {
            *all = vaddq_f32(*all, vabsq_f32(left));
            vst1q_f32(out + 4 * j, vmulq_n_f32(left, decay));
        }
    }
    uint16x8_t low = vcombine_u16(vmovn_u32(codes[0]), vmovn_u32(codes[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32(codes[2]), vmovn_u32(codes[3]));
    return vcombine_u8(vmovn_u16(low), vmovn_u16(high));
}

/* Bytes below 2^bits in pairs of two, the first one lower. */
GC_INLINE uint8x8_t pairs(uint8x16_t bytes, unsigned bits)
{
    uint16x8_t h = vreinterpretq_u16_u8(bytes);
    return vmovn_u16(bits == 4 ? vsraq_n_u16(h, h, 4) : vsraq_n_u16(h, h, 6));
}

GC_INLINE void emit_block(const float *x, uint8_t *codes, const gc_block_levels *levels,
                          float decay, float *out, float32x4_t *all, unsigned bits, int ternary)
{
    uint8x16_t low = emit16(x, levels, decay, out, all, ternary);
    uint8x16_t high = emit16(x + 16, levels, decay, out ? out + 16 : NULL, all, ternary);
    if (bits == 8) {
        vst1q_u8(codes, low);
        vst1q_u8(codes + 16, high);
        return;
    }
    uint8x16_t packed = vcombine_u8(pairs(low, bits), pairs(high, bits));
    if (bits == 4)
        vst1q_u8(codes, packed);
    else
        vst1_u8(codes, pairs(packed, 4));
}

GC_INLINE double emit_body(const gc_block_staged *staged, uint32_t numel, unsigned bits,
                           int ternary)
{
    const float *x = staged->x;
    uint8_t *codes = staged->codes;
    const gc_block_levels *levels = &staged->levels;
    float *out = staged->out, decay = staged->decay;
    float32x4_t all = vdupq_n_f32(0);
    uint32_t i = 0;
    for (; i + EMIT_NUMEL <= numel; i += EMIT_NUMEL)
        emit_block(x + i, codes + (size_t)i * bits / 8, levels, decay, out ? out + i : NULL, &all,
                   bits, ternary);
    double sum = vaddvq_f32(all);
    if (i < numel) {
        float rest[EMIT_NUMEL];
        emit_block(x + i, codes + (size_t)i * bits / 8, levels, 1.0f, rest, &all, bits, ternary);
        for (uint32_t j = 0; out && j < numel - i; j++) {
            out[i + j] = decay * rest[j];
            sum += rest[j] < 0 ? -rest[j] : rest[j];
        }
    }
    return sum;
}

static double emit(const gc_block_staged *staged, uint32_t numel)
{
    if (staged->levels.ternary)
        return emit_body(staged, numel, 2, 1);
    if (staged->bits == 2)
        return emit_body(staged, numel, 2, 0);
    if (staged->bits == 4)
        return emit_body(staged, numel, 4, 0);
    return emit_body(staged, numel, 8, 0);
}

void gc_block_encode_neon(gc_encode_job *job, const gc_segment *segment)
{
    static const gc_block_tier tier = {take, emit, NULL};
    gc_encode_blocks(job, segment, &tier);
}
#endif
