// The C functions that native.py calls. ctypes releases the GIL during each call.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <new>

#include "loading.h"
#include "shared_memory.h"
#include "step.h"

using namespace trioserve;

namespace {

// Gives the system advice for the pages that are completely inside this memory.
int advise(void* memory, int64_t bytes, int advice) {
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t first = (uintptr_t(memory) + PAGE - 1) / PAGE * PAGE, end = (uintptr_t(memory) + bytes) / PAGE * PAGE;
    return end > first ? madvise(reinterpret_cast<void*>(first), end - first, advice) : 0;
}

}  // namespace

extern "C" {

// Requests the CPU features that need the system's permission. Returns 0 if they are granted.
int32_t trioserve_prepare() {
#if defined(__AMX_BF16__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? 0 : 1;
#else
    return 0;
#endif
}

// Requests large pages for memory that has not been written yet. If the system refuses, nothing changes.
void trioserve_use_large_pages(void* memory, int64_t bytes) { advise(memory, bytes, MADV_HUGEPAGE); }

// Makes the system provide the memory now instead of at the first write. Written content stays. Returns 0 if the system does
// not support this or has no memory left.
int32_t trioserve_claim(void* memory, int64_t bytes) {
    constexpr int POPULATE_WRITE = 23;  // since Linux 5.14. Older headers do not define it
    return advise(memory, bytes, POPULATE_WRITE) == 0;
}

Engine* trioserve_make_engine(int32_t thread_count) {
    try {
        return make_engine(thread_count);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void trioserve_close_engine(Engine* engine) { close_engine(engine); }

// Returns zeroed memory in large pages if the system has them, or null. Each step reads all weights, and walking the tables of
// small pages takes a part of that time.
void* trioserve_allocate(int64_t bytes) {
    void* memory = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    trioserve_use_large_pages(memory, bytes);
    return memory;
}

void trioserve_release(void* memory, int64_t bytes) { munmap(memory, size_t(bytes)); }

// Returns the number of elements of a packed weight [n, k].
int64_t trioserve_packed_count(int64_t n, int64_t k) { return block_count(n) * LANES * padded_depth(k); }

void trioserve_pack(int32_t dtype, const void* weight, int64_t n, int64_t k, void* to, int64_t first_block,
                    int64_t block_step) {
    pack_dense(dtype, weight, n, k, to, first_block, block_step);
}

// Returns the bytes of a quantized weight [n, k].
int64_t trioserve_quantized_bytes(int32_t format, int64_t n, int64_t k) { return quantized_bytes(format, n, k); }

// Like trioserve_pack. blocks: blocks of a GGUF file, of ggml's type `storage`. They are packed in format_of(storage).
void trioserve_pack_blocks(int32_t storage, const void* blocks, int64_t n, int64_t k, void* to, int64_t first_block,
                           int64_t block_step) {
    pack_blocks(storage, static_cast<const uint8_t*>(blocks), n, k, static_cast<uint8_t*>(to), first_block, block_step);
}

// Like trioserve_pack. values: float32, quantized to Q8 or Q4_MIN.
void trioserve_pack_values(int32_t format, const float* values, int64_t n, int64_t k, void* to, int64_t first_block,
                           int64_t block_step) {
    pack_values(format, values, n, k, static_cast<uint8_t*>(to), first_block, block_step);
}

int64_t trioserve_load_files(Loading* loading, const int32_t* files, int32_t* error) {
    return load_files(*loading, files, *error);
}

// Returns 0: finished, 1: abandoned, 2: out of memory.
int32_t trioserve_step(Engine* engine, const Model* model, const Step* step) {
    try {
        return run_step(*engine, *model, *step) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// Returns 0: done, 1: a row was not finite, 2: out of memory.
int32_t trioserve_logprobs(Engine* engine, const Model* model, const float* hidden, int64_t rows, const int32_t* targets,
                           int32_t top_count, float* logprobs, int32_t* top_ids) {
    try {
        return run_logprobs(*engine, *model, hidden, rows, targets, top_count, logprobs, top_ids) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

int64_t trioserve_shared_memory_bytes(int32_t size) { return SharedMemory::byte_count(size); }

// memory: byte_count(size) bytes, zeros before the first rank joins. Returns null if there is no memory for this rank's object.
SharedMemory* trioserve_join_shared_memory(void* memory, int32_t rank, int32_t size) {
    return new (std::nothrow) SharedMemory(memory, rank, size);
}

void trioserve_leave_shared_memory(SharedMemory* shared) { delete shared; }

const Collectives* trioserve_shared_collectives(const SharedMemory* shared) { return &shared->collectives(); }

int32_t trioserve_shared_sum(SharedMemory* shared, int32_t dtype, void* values, int64_t count, int32_t is_abandoned) {
    return shared->sum(SumDtype(dtype), values, count, is_abandoned != 0, values);
}

double trioserve_shared_seconds(const SharedMemory* shared) { return shared->seconds(); }

void trioserve_shared_gather(SharedMemory* shared, const void* own, int64_t bytes, void* all) {
    shared->gather(own, bytes, all);
}

// Only tests and measurements call the functions below.
void trioserve_dequantize(int32_t format, const void* packed, int64_t n, int64_t k, float* to) {
    for (int64_t row = 0; row < n; row++)
        dequantize_row(format, static_cast<const uint8_t*>(packed), row, k, to + row * k);
}

void trioserve_product(Engine* engine, int32_t dtype, int32_t batch_invariant, const void* x, int64_t m,
                       const Matrix* weight, int64_t n, float* y) {
    run_product(*engine, DtypeName(dtype), batch_invariant != 0, x, m, *weight, n, y);
}

void trioserve_attention(Engine* engine, const Model* model, const Step* step, const void* queries, void* attended) {
    run_attention(*engine, *model, *step, queries, attended);
}

void trioserve_sampling(Engine* engine, const Step* step, int64_t vocab, const float* logits) {
    run_sampling(*engine, *step, vocab, logits);
}

}  // extern "C"
