/* status.c - the names of the status codes. */
#include "gradcomp.h"

const char *gc_status_name(int status)
{
    switch (status) {
    case GC_OK:
        return "GC_OK";
    case GC_INVALID_ARGUMENT:
        return "GC_INVALID_ARGUMENT";
    case GC_UNSUPPORTED_TIER:
        return "GC_UNSUPPORTED_TIER";
    case GC_FORBIDDEN_CODE:
        return "GC_FORBIDDEN_CODE";
    case GC_BAD_PADDING:
        return "GC_BAD_PADDING";
    case GC_LANE_RANGE:
        return "GC_LANE_RANGE";
    case GC_BAD_SCALE:
        return "GC_BAD_SCALE";
    default:
        return "GC_UNKNOWN_STATUS";
    }
}
