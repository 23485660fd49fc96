// Packing of weights from memory, or from rows of a file in pieces. A piece is read to a buffer that stays in the L2 cache,
// and packed from there. Any number of threads share the work.
#pragma once

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <vector>

#include "quantized.h"
#include "step.h"

namespace trioserve {

constexpr int64_t PIECE_BYTES = 1 << 18;

// `Number` is the content of a unit for one output: a float32 or a pair of bfloat16. An odd last bfloat16 is paired with zero.
template <class T, class Number>
void pack_rows(const T* from, int64_t rows, int64_t k, int64_t first_unit, Number* block) {
    constexpr int DEPTH = sizeof(Number) / sizeof(T);
    for (int64_t row = 0; row < rows; row++) {
        const T* values = from + row * k;
        for (int64_t unit = first_unit; unit < k / DEPTH; unit++)
            std::memcpy(block + unit * LANES + row, values + unit * DEPTH, sizeof(Number));
        if (k % DEPTH) std::memcpy(block + k / DEPTH * LANES + row, values + k / DEPTH * DEPTH, sizeof(T));
    }
}

template <class Number, class T>
void pack(const T* from, int64_t n, int64_t k, void* to, int64_t first_block, int64_t block_step) {
    constexpr int DEPTH = sizeof(Number) / sizeof(T);
    const int64_t units = padded_depth(k) / DEPTH;
    for (int64_t row = 0; row < n; row += LANES, from += LANES * k) {
        Number* block = static_cast<Number*>(to) + (first_block + row / LANES * block_step) * units * LANES;
        const int64_t rows = std::min<int64_t>(LANES, n - row);
        int64_t unit = 0;
        // Sixteen units of sixteen rows at a time: reads and writes whole cache lines.
        for (; rows == LANES && unit + LANES <= k / DEPTH; unit += LANES) {
            Lanes lines[LANES];
            for (int line = 0; line < LANES; line++)
                lines[line] = load(reinterpret_cast<const float*>(from + line * k + unit * DEPTH));
            transpose(lines);
            for (int line = 0; line < LANES; line++)
                store(reinterpret_cast<float*>(block + (unit + line) * LANES), lines[line]);
        }
        pack_rows(from, rows, k, unit, block);
    }
}

// weight: [n, k] in the model's dtype. Its blocks become blocks first_block, first_block + block_step, ... of `to`, which must
// be zero before.
inline void pack_dense(int32_t dtype, const void* weight, int64_t n, int64_t k, void* to, int64_t first_block,
                       int64_t block_step) {
    if (dtype == BFLOAT16)
        pack<uint32_t>(static_cast<const bf16*>(weight), n, k, to, first_block, block_step);
    else
        pack<float>(static_cast<const float*>(weight), n, k, to, first_block, block_step);
}

enum RowsKind : int32_t { COPIED = 0, DENSE_ROWS = 1, BLOCK_ROWS = 2 };

// Rows of a matrix [*, columns] in a file, from `offset` on. type: their dtype, or their storage type for BLOCK_ROWS. COPIED
// rows are copied to `to`. Other rows become blocks first_block, first_block + block_step, ... of the packed weight there.
// pairs_of: interleaves the two halves of every pairs_of rows, block by block. 0 keeps the order. counts_as: added to
// bytes_done.
struct FileRows {
    int64_t offset, rows, columns, row_bytes;
    void* to;
    int64_t first_block, block_step, counts_as;
    int32_t file, kind, type, pairs_of;
};

// The rows to load, and the state that the threads share while they load them.
struct Loading {
    const FileRows* rows;
    int64_t count;
    std::atomic<int64_t> next, bytes_done;
    std::atomic<int32_t> is_stopped;
};

constexpr int32_t FILE_ENDED = -1;

// Returns 0, or an error number.
inline int32_t read_all(int file, uint8_t* to, int64_t bytes, int64_t offset) {
    while (bytes) {
        const ssize_t count = pread(file, to, size_t(bytes), off_t(offset));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count ? errno : FILE_ENDED;
        to += count, offset += count, bytes -= count;
    }
    return 0;
}

inline void pack_piece(const FileRows& of, const uint8_t* piece, int64_t rows, int64_t first_block) {
    if (of.kind == DENSE_ROWS)
        pack_dense(of.type, piece, rows, of.columns, of.to, first_block, of.block_step);
    else
        pack_blocks(of.type, piece, rows, of.columns, static_cast<uint8_t*>(of.to), first_block, of.block_step);
}

inline int32_t load_rows(const FileRows& of, int file, std::vector<uint8_t>& buffer, const std::atomic<int32_t>& is_stopped) {
    if (of.kind == COPIED) return read_all(file, static_cast<uint8_t*>(of.to), of.rows * of.row_bytes, of.offset);
    const int64_t piece_rows = std::max<int64_t>(PIECE_BYTES / of.row_bytes / LANES, 1) * LANES;
    if (int64_t(buffer.size()) < piece_rows * of.row_bytes) buffer.resize(size_t(piece_rows * of.row_bytes));
    for (int64_t first = 0; first < of.rows && !is_stopped; first += piece_rows) {
        const int64_t rows = std::min(piece_rows, of.rows - first);
        const int32_t error = read_all(file, buffer.data(), rows * of.row_bytes, of.offset + first * of.row_bytes);
        if (error) return error;
        if (!of.pairs_of) {
            pack_piece(of, buffer.data(), rows, of.first_block + first / LANES * of.block_step);
            continue;
        }
        const int64_t head_blocks = of.pairs_of / LANES, half = head_blocks / 2;
        for (int64_t row = 0; row < rows; row += LANES) {
            const int64_t block = (first + row) / LANES, in_head = block % head_blocks;
            const int64_t place = block - in_head + in_head % half * 2 + in_head / half;
            pack_piece(of, buffer.data() + row * of.row_bytes, LANES, of.first_block + place * of.block_step);
        }
    }
    return 0;
}

// files: this thread's own descriptors, indexed by FileRows.file. Returns -1 after success. If a read fails, sets `error`,
// returns the index of the rows that could not be read, and stops the other threads.
inline int64_t load_files(Loading& loading, const int32_t* files, int32_t& error) {
    std::vector<uint8_t> buffer;
    while (!loading.is_stopped) {
        const int64_t index = loading.next++;
        if (index >= loading.count) break;
        const FileRows& of = loading.rows[index];
        try {
            error = load_rows(of, files[of.file], buffer, loading.is_stopped);
        } catch (const std::bad_alloc&) {
            error = ENOMEM;
        }
        if (error) {
            loading.is_stopped = 1;
            return index;
        }
        loading.bytes_done += of.counts_as;
    }
    return -1;
}

}  // namespace trioserve
