// A CUDA driver without a GPU: it keeps the rules that the driver's documentation states (CUDA Driver API, cuTensorMapEncodeTiled,
// cuLaunchKernelEx, cuFuncSetAttribute; CUDA C Programming Guide, compute capabilities), computes nothing, and writes down what
// it was asked for, a line each. A broken rule is the error that the driver would give, with the rule as its text.
#include <cuda.h>
#include <elf.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SECTION_INFO = 0x70000000, REGCOUNT = 0x2f, KPARAM = 0x17, REQNTID = 0x10, MACHINE = 190, RESERVED = 1024, PARAMS = 64 };

typedef struct {
    char name[256];
    int registers, threads, params, dynamic;
    struct { unsigned offset, size; } param[PARAMS];
} Function;

typedef struct {
    unsigned char *image;
    const char *names, *symbols_names;
    Elf64_Shdr *sections;
    Elf64_Sym *symbols;
    int count, symbols_count;
} Module;

typedef struct { unsigned long long from, size; } Range;

static struct { int major, minor, units, shared, per_unit; } chip = {9, 0, 132, 232448, 233472};
static char broken[512], *log_text;
static size_t log_size;
static Range *ranges;
static int ranges_count;
static unsigned long long maps;

static void note(const char *format, ...) {
    char line[4096];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    log_text = realloc(log_text, log_size + n + 2);
    memcpy(log_text + log_size, line, n);
    log_size += n;
    log_text[log_size++] = '\n';
    log_text[log_size] = 0;
}

static CUresult refuse(CUresult code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(broken, sizeof broken, format, args);
    va_end(args);
    note("broken %s", broken);
    return code;
}

// what a test says and asks

void stand_in_chip(int major, int minor, int units, int shared, int per_unit) {
    chip.major = major, chip.minor = minor, chip.units = units, chip.shared = shared, chip.per_unit = per_unit;
}

void stand_in_memory(unsigned long long from, unsigned long long size) {
    ranges = realloc(ranges, (ranges_count + 1) * sizeof *ranges);
    ranges[ranges_count++] = (Range){from, size};
}

const char *stand_in_log(void) { return log_text ? log_text : ""; }

void stand_in_forget(void) {
    free(log_text);
    log_text = NULL, log_size = 0, ranges_count = 0, broken[0] = 0;
}

static const Range *range_of(unsigned long long at) {
    for (int i = 0; i < ranges_count; i++)
        if (ranges[i].from <= at && at - ranges[i].from < ranges[i].size) return &ranges[i];
    return NULL;
}

// device and context

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { return *v = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { return *n = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int k) { return *d = k, k ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { return *c = (CUcontext)&chip, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return c == (CUcontext)&chip ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxGetDevice(CUdevice *d) { return *d = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return cuCtxGetCurrent(c); }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { return *v = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *v) { return *v = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
    switch (a) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *v = chip.major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *v = chip.minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *v = chip.units; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *v = chip.shared; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *v = chip.per_unit; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *v = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *v = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *v = 1755000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *v = 2619000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *v = 5120; break;
    default: return refuse(CUDA_ERROR_INVALID_VALUE, "device attribute %d, which the stand-in does not know", (int)a);
    }
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult e, const char **text) {
    static char said[600];
    snprintf(said, sizeof said, "%s (%d)", broken[0] ? broken : "refused", (int)e);
    return *text = said, CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
    if (!range_of(p)) return refuse(CUDA_ERROR_INVALID_VALUE, "address %#llx is in no allocation", (unsigned long long)p);
    if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return *(CUdeviceptr *)v = p, CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_VALUE, "pointer attribute %d, which the stand-in does not know", (int)a);
}

// modules: a cubin is an ELF file whose sections .nv.info say what kernels need and take

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    Elf64_Ehdr *head = (Elf64_Ehdr *)image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_machine != MACHINE)
        return refuse(CUDA_ERROR_INVALID_IMAGE, "the image is no cubin");
    int arch = head->e_ident[EI_ABIVERSION] >= 8 ? head->e_flags >> 8 & 0xff : head->e_flags & 0xff;
    if (arch != 10 * chip.major + chip.minor)
        return refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, "the cubin is for sm_%d, the device is sm_%d%d", arch, chip.major, chip.minor);
    Module *m = calloc(1, sizeof *m);
    size_t size = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    const Elf64_Shdr *given = (const Elf64_Shdr *)((const char *)image + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++)
        if (given[i].sh_type != SHT_NOBITS && given[i].sh_offset + given[i].sh_size > size) size = given[i].sh_offset + given[i].sh_size;
    memcpy(m->image = malloc(size), image, size);
    m->sections = (Elf64_Shdr *)(m->image + head->e_shoff), m->count = head->e_shnum;
    m->names = (char *)m->image + m->sections[head->e_shstrndx].sh_offset;
    for (int i = 0; i < m->count; i++)
        if (m->sections[i].sh_type == SHT_SYMTAB) {
            m->symbols = (Elf64_Sym *)(m->image + m->sections[i].sh_offset);
            m->symbols_count = m->sections[i].sh_size / sizeof *m->symbols;
            m->symbols_names = (char *)m->image + m->sections[m->sections[i].sh_link].sh_offset;
        }
    return *out = (CUmodule)m, CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }

static void read_info(Module *m, Elf64_Shdr *s, Function *f, int own) {
    unsigned char *at = m->image + s->sh_offset, *end = at + s->sh_size;
    while (at + 4 <= end) {
        unsigned size = at[0] == 4 ? at[2] | at[3] << 8 : 0, *v = (unsigned *)(at + 4);
        if (at[0] == 4 && at[1] == REGCOUNT && !own && v[0] < (unsigned)m->symbols_count &&
            !strcmp(m->symbols_names + m->symbols[v[0]].st_name, f->name))
            f->registers = v[1];
        if (at[0] == 4 && at[1] == REQNTID && own) f->threads = v[0] * v[1] * v[2];
        if (at[0] == 4 && at[1] == KPARAM && own) {
            unsigned ordinal = v[1] & 0xffff;
            if (ordinal < PARAMS) f->param[ordinal].offset = v[1] >> 16, f->param[ordinal].size = v[2] >> 18;
            if ((int)ordinal >= f->params) f->params = ordinal + 1;
        }
        at += 4 + size;
    }
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    Module *m = (Module *)module;
    Function *f = calloc(1, sizeof *f);
    int found = 0;
    char own[300];
    snprintf(f->name, sizeof f->name, "%s", name);
    snprintf(own, sizeof own, ".nv.info.%s", name);
    for (int i = 0; i < m->count; i++) {
        if (m->sections[i].sh_type != SECTION_INFO) continue;
        const char *section = m->names + m->sections[i].sh_name;
        int is_own = !strcmp(section, own);
        found |= is_own;
        if (is_own || !strcmp(section, ".nv.info")) read_info(m, &m->sections[i], f, is_own);
    }
    f->dynamic = 49152;
    if (!found) return refuse(CUDA_ERROR_NOT_FOUND, "the module has no kernel %s", name);
    if (f->params > PARAMS) return refuse(CUDA_ERROR_INVALID_VALUE, "%s has %d parameters", name, f->params);
    return *out = (CUfunction)f, CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction function) {
    Function *f = (Function *)function;
    switch (a) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *v = f->registers; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = f->threads ? f->threads : 1024; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *v = 0; break;
    default: return refuse(CUDA_ERROR_INVALID_VALUE, "function attribute %d, which the stand-in does not know", (int)a);
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute a, int v) {
    Function *f = (Function *)function;
    if (a != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;  // as older drivers say
    if (v < 0 || v > chip.shared)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: dynamic shared memory of %d bytes, at most %d", f->name, v, chip.shared);
    return f->dynamic = v, CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { return *n = chip.units, CUDA_SUCCESS; }

// tensor maps: every sentence of the documentation of cuTensorMapEncodeTiled that says "must"

static unsigned element(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16: case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32: case CU_TENSOR_MAP_DATA_TYPE_INT32: case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ: case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64: case CU_TENSOR_MAP_DATA_TYPE_INT64: case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 0;
    }
}

#define MUST(condition, ...) if (!(condition)) return refuse(CUDA_ERROR_INVALID_VALUE, "tensor map: " __VA_ARGS__)
typedef unsigned long long ull;

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim, const cuuint64_t *stride,
    const cuuint32_t *box, const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    unsigned size = element(type);
    static const unsigned spans[] = {0, 32, 64, 128, 128, 128, 128};
    MUST(chip.major >= 9, "sm_%d%d has none", chip.major, chip.minor);
    MUST((size_t)map % 64 == 0, "itself at %p, no multiple of 64 bytes", (void *)map);
    MUST(size, "data type %d", (int)type);
    MUST(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE, "interleave %d", (int)interleave);
    MUST(rank >= 1 && rank <= 5, "rank %u", rank);
    MUST((size_t)address % 16 == 0, "address %p, no multiple of 16 bytes", address);
    MUST((unsigned)swizzle < sizeof spans / sizeof *spans, "swizzle %d", (int)swizzle);
    MUST(!fill || type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "NaN fills a tensor of integers");
    ull last = size;
    for (unsigned i = 0; i < rank; i++) {
        MUST(dim[i] && dim[i] <= 1ull << 32, "extent %llu of axis %u", (ull)dim[i], i);
        MUST(box[i] && box[i] <= 256, "box of %u along axis %u, at most 256", box[i], i);
        MUST(step[i] && step[i] <= 8, "element stride %u", step[i]);
        if (i) {
            MUST(stride[i - 1] % 16 == 0 && stride[i - 1] && stride[i - 1] < 1ull << 40,
                 "stride of %llu bytes along axis %u, no multiple of 16 below 2^40", (ull)stride[i - 1], i);
        }
        last += (dim[i] - 1) * (i ? stride[i - 1] : size);
    }
    MUST(box[0] * size % 16 == 0, "rows of a box of %u bytes, no multiple of 16", box[0] * size);
    MUST(!swizzle || box[0] * size <= spans[swizzle], "rows of a box of %u bytes, swizzled in %u", box[0] * size, spans[swizzle]);
    // sentences that drivers do not enforce
    if (rank > 1 && stride[0] < dim[0] * size) note("overlap of rows: %llu bytes every %llu", (ull)dim[0] * size, (ull)stride[0]);
    const Range *in = range_of((ull)address);
    MUST(in, "address %p is in no allocation", address);
    MUST((ull)address + last <= in->from + in->size, "%llu bytes from %p, %llu beyond the allocation", last, address,
         (ull)address + last - in->from - in->size);
    memset(map, 0, sizeof *map);
    ((ull *)map)[0] = (ull)address, ((ull *)map)[1] = ++maps;
    note("map %llu %llu %u %llu %u %u", maps, (ull)address, rank, last, size, box[0]);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim, const cuuint64_t *stride,
    const int *low, const int *high, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *step,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "tensor map: im2col, which the stand-in does not know");
}

// launches: `launch NAME GRID… THREADS SHARED PARAMETER…`, parameters as numbers, a tensor map as `map:NUMBER`

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    Function *f = (Function *)function;
    unsigned threads = c->blockDimX * c->blockDimY * c->blockDimZ, grain = (f->registers * 32 + 255) / 256 * 256;
    if (!c->gridDimX || !c->gridDimY || !c->gridDimZ || c->gridDimX > 0x7fffffff || c->gridDimY > 65535 || c->gridDimZ > 65535)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: grid of %u x %u x %u", f->name, c->gridDimX, c->gridDimY, c->gridDimZ);
    if (!threads || threads > 1024 || c->blockDimZ > 64)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u threads in a block", f->name, threads);
    if (f->threads && threads != (unsigned)f->threads)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u threads in a block, compiled for %d", f->name, threads, f->threads);
    if ((threads + 31) / 32 * grain > 65536)
        return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "%s: %u threads of %d registers", f->name, threads, f->registers);
    if ((int)c->sharedMemBytes > f->dynamic || (int)c->sharedMemBytes > chip.shared)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u bytes of shared memory, at most %d", f->name, c->sharedMemBytes, f->dynamic);
    char given[3000];
    int n = given[0] = 0;
    for (int i = 0; i < f->params && n < (int)sizeof given - 40; i++) {
        const unsigned size = f->param[i].size;
        ull v = 0;
        if (size == sizeof(CUtensorMap)) {
            const ull *map = params[i];
            if (!map[1] || map[1] > maps) return refuse(CUDA_ERROR_INVALID_VALUE, "%s: parameter %d is no tensor map", f->name, i);
            n += snprintf(given + n, sizeof given - n, " map:%llu", map[1]);
            continue;
        }
        if (size > 8) return refuse(CUDA_ERROR_INVALID_VALUE, "%s: parameter %d has %u bytes", f->name, i, size);
        memcpy(&v, params[i], size);
        n += snprintf(given + n, sizeof given - n, " %llu", v);
    }
    note("launch %s %u %u %u %u %u%s", f->name, c->gridDimX, c->gridDimY, c->gridDimZ, threads, c->sharedMemBytes, given);
    return CUDA_SUCCESS;
}
