/* update.h - what a kind of update reads and writes; joining and splitting of weights. */
#ifndef GC_UPDATE_H
#define GC_UPDATE_H

#include "numeric.h"

GC_INLINE int gc_reads_gradient(uint32_t kind)
{
    return kind != GC_LAMB_NORMS && kind != GC_LAMB_APPLY;
}
GC_INLINE int gc_adds_up(uint32_t kind)
{
    return kind == GC_LAMB_START || kind == GC_LAMB_NORMS || kind == GC_SQUARES;
}
GC_INLINE int gc_touches_weight(uint32_t kind) { return kind != GC_MOMENTS && kind != GC_SQUARES; }
GC_INLINE int gc_writes_weight(uint32_t kind) { return kind <= GC_ADAMW || kind == GC_LAMB_APPLY; }
GC_INLINE int gc_uses_state0(const gc_rule *rule)
{
    return rule->kind == GC_SGD ? rule->momentum != 0 : rule->kind != GC_SQUARES;
}
GC_INLINE int gc_uses_state1(uint32_t kind) { return kind >= GC_ADAMW && kind <= GC_LAMB_APPLY; }

GC_INLINE uint32_t gc_join_bits(uint32_t top, uint32_t trail, uint32_t rounding)
{
    uint32_t is_nan = (top & 0x7FFF) > 0x7F80;
    if (rounding == GC_NEAREST && !is_nan)
        top -= trail >> 15;
    return top << 16 | trail;
}

GC_INLINE uint16_t gc_top_of(uint32_t bits, uint32_t rounding)
{
    uint32_t is_nan = (bits & GC_ABS_MASK) > GC_INF_BITS;
    if (rounding == GC_TRUNCATE)
        return (uint16_t)(bits >> 16);
    return (uint16_t)(is_nan ? bits >> 16 | 0x0040 : (bits >> 16) + (bits >> 15 & 1));
}

#endif
