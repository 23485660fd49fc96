// LoRA adapters (arXiv 2106.09685) in the products of a step: y += B (A x), where A and B belong to the adapter of the row.
//
// A x of all rows is computed before the product, in float32, and stored in the model's dtype. B (A x) is added to the sums of
// the product before they are stored. Rows with the same adapter share one read of A. A row is summed in the same order in
// every batch.
#pragma once

#include <vector>

#include "buffer.h"
#include "product.h"
#include "team.h"

namespace trioserve {

// Some of a matrix's outputs: blocks first_block, first_block + block_step, ... of 16. b: [rank / DEPTH][16][DEPTH] numbers
// per block, where DEPTH is that of a Unit. They include the adapter's scale. first: index of the part's numbers in A x.
// A part with block_count 0 is absent.
struct AdapterPart {
    const void* b;
    int32_t first_block, block_step, block_count, rank, first;
};

// a: packed (see product.h), with `rank` outputs, a multiple of 16, in the order of the parts. rank 0 adds nothing.
struct AdapterMatrix {
    const void* a;
    AdapterPart parts[3];
    int32_t rank;
};

// Adapter matrices of one layer of the model.
struct AdapterLayer {
    AdapterMatrix qkv, output, gate_up, down;
};

using AdapterOf = AdapterMatrix AdapterLayer::*;

class StepAdapters {
public:
    // Allocates memory before the threads start, because a thread cannot report a failure. adapters: for each chunk its layers,
    // or null. Null if no chunk has an adapter. depth_max: longest padded row of a product.
    template <class T>
    void plan(const AdapterLayer* const* adapters, const std::vector<int32_t>& chunk_of_row, int32_t layer_count, int threads,
              int64_t depth_max) {
        groups_.clear();
        rows_.clear();
        of_row_.assign(chunk_of_row.size(), nullptr);
        if (adapters == nullptr) return;
        stride_ = 0;
        for (size_t row = 0; row < chunk_of_row.size(); row++) of_row_[row] = adapters[chunk_of_row[row]];
        for (size_t row = 0; row < of_row_.size(); row++) {
            const AdapterLayer* layers = of_row_[row];
            if (layers == nullptr || knows(layers)) continue;
            groups_.push_back({layers, int32_t(rows_.size()), 0});
            for (size_t other = row; other < of_row_.size(); other++)
                if (of_row_[other] == layers) rows_.push_back(int32_t(other));
            groups_.back().count = int32_t(rows_.size()) - groups_.back().first;
            for (int32_t layer = 0; layer < layer_count; layer++)
                for (const AdapterOf which : {&AdapterLayer::qkv, &AdapterLayer::output, &AdapterLayer::gate_up, &AdapterLayer::down})
                    stride_ = std::max(stride_, (layers[layer].*which).rank);
        }
        if (groups_.empty()) return;
        depth_max_ = depth_max;
        lowered_.of<T>(int64_t(of_row_.size()) * stride_);
        gathered_.of<T>(threads * TILE_ROWS * depth_max_);
    }

    bool are_there() const { return !groups_.empty(); }

    // Computes A x of all rows with an adapter. Team::meet() must follow. x: the product's rows.
    template <class T>
    void lower(Team& team, int thread, const Rows<const T>& x, AdapterOf which, int32_t layer) {
        int64_t count = 0;
        for (const Group& group : groups_) count += pieces_of(group, which, layer);
        for (int64_t index; (index = team.take_share(thread, count)) >= 0;) {
            const Group* group = groups_.data();
            for (int64_t pieces; index >= (pieces = pieces_of(*group, which, layer)); group++) index -= pieces;
            const AdapterMatrix& matrix = group->layers[layer].*which;
            const int64_t panels = panel_count(matrix.rank / LANES);
            const int64_t first = index / panels * TILE_ROWS, block = index % panels * PANEL_BLOCKS;
            lower_piece(thread, x, rows_.data() + group->first + first,
                        int(std::min<int64_t>(TILE_ROWS, group->count - first)), matrix, block);
        }
    }

    // Adds B (A x) to the sums of some outputs of some rows (see Finishing).
    template <class T>
    void add_to(AdapterOf which, int32_t layer, int64_t first_row, int count, int64_t first_block, int blocks, float* sums) {
        for (int row = 0; row < count; row++) {
            const AdapterLayer* layers = of_row_[first_row + row];
            if (layers == nullptr) continue;
            const AdapterMatrix& matrix = layers[layer].*which;
            if (matrix.rank == 0) continue;
            const T* lowered = lowered_.of<T>(0) + (first_row + row) * stride_;
            const Block<T> first = block_of(matrix, lowered, first_block);
            const Block<T> second = blocks > 1 ? block_of(matrix, lowered, first_block + 1) : Block<T>{};
            if (first.rank == second.rank) {
                add_block<T, 2>({first, second}, sums + row * PANEL);
            } else {
                add_block<T, 1>({first}, sums + row * PANEL);
                add_block<T, 1>({second}, sums + row * PANEL + LANES);
            }
        }
    }

private:
    struct Group {
        const AdapterLayer* layers;
        int32_t first, count;  // range of rows_
    };

    bool knows(const AdapterLayer* layers) const {
        for (const Group& group : groups_)
            if (group.layers == layers) return true;
        return false;
    }

    static int64_t pieces_of(const Group& group, AdapterOf which, int32_t layer) {
        return (group.count + TILE_ROWS - 1) / TILE_ROWS * panel_count((group.layers[layer].*which).rank / LANES);
    }

    template <class T>
    void lower_piece(int thread, const Rows<const T>& x, const int32_t* rows, int count, const AdapterMatrix& matrix,
                     int64_t first_block) {
        const int64_t depth = x.depth;
        const T* values = x.numbers + rows[0] * depth;
        if (x.are_tiles || rows[count - 1] - rows[0] != count - 1) {
            T* gathered = gathered_.of<T>(0) + thread * TILE_ROWS * depth_max_;
            for (int row = 0; row < count; row++)
                for (int64_t k = 0; k < depth; k += LANES)
                    std::memcpy(gathered + row * depth + k, x.at(rows[row], k), sizeof(T) * LANES);
            values = gathered;
        }
        const int blocks = int(std::min<int64_t>(PANEL_BLOCKS, matrix.rank / LANES - first_block));
        const int64_t block_stride = depth * LANES;
        const T* weights = static_cast<const T*>(matrix.a) + first_block * block_stride;
        constexpr int64_t AHEAD = 32 * 64 / int64_t(sizeof(T));  // numbers to prefetch ahead
        const T* fetch[2] = {weights + AHEAD, weights + (blocks - 1) * block_stride + AHEAD};
        alignas(64) float sums[TILE_ROWS * PANEL];
        const Tile<T> run = blocks == PANEL_BLOCKS ? tile_of<T, PANEL_BLOCKS>(count) : tile_of<T, 1>(count);
        run(values, depth, weights, block_stride, depth, sums, PANEL, true, fetch);
        for (int row = 0; row < count; row++)
            for (int block = 0; block < blocks; block++)
                store(lowered_.of<T>(0) + rows[row] * int64_t(stride_) + (first_block + block) * LANES,
                      load(sums + row * PANEL + block * LANES));
    }

    // 16 outputs of one row: B's numbers for them, and the numbers of A x to multiply them with. rank 0 adds nothing.
    template <class T>
    struct Block {
        const T* b = nullptr;
        const T* lowered = nullptr;
        int32_t rank = 0;
        int32_t apart = 0;  // distance to the block that this thread adds next, in bytes
    };

    template <class T>
    static Block<T> block_of(const AdapterMatrix& matrix, const T* lowered, int64_t block) {
        for (const AdapterPart& part : matrix.parts) {
            if (part.block_count == 0) continue;
            const int32_t behind = int32_t(block) - part.first_block, step_bits = part.block_step - 1;  // block_step is 1 or 2
            if (behind < 0 || (behind & step_bits) != 0 || behind >> step_bits >= part.block_count) continue;
            const int32_t numbers = part.rank * LANES;
            return {static_cast<const T*>(part.b) + int64_t(behind >> step_bits) * numbers, lowered + part.first, part.rank,
                    (PANEL_BLOCKS >> step_bits) * numbers * int32_t(sizeof(T))};
        }
        return {};
    }

    // Adds to the sums of blocks of equal rank, side by side.
    template <class T, int BLOCKS>
    static void add_block(const Block<T> (&blocks)[BLOCKS], float* sums) {
        using U = Unit<T>;
        Lanes sum[BLOCKS];
        for (int block = 0; block < BLOCKS; block++) sum[block] = load(sums + block * LANES);
        for (int32_t unit = 0; unit < blocks[0].rank; unit += U::DEPTH) {
            for (int block = 0; block < BLOCKS; block++) {
                const T* b = blocks[block].b + unit * LANES;
                _mm_prefetch(reinterpret_cast<const char*>(b) + blocks[block].apart, _MM_HINT_T1);
                sum[block] = U::add_product(sum[block], U::weight(b), U::value(blocks[block].lowered + unit));
            }
        }
        for (int block = 0; block < BLOCKS; block++) store(sums + block * LANES, sum[block]);
    }

    std::vector<Group> groups_;
    std::vector<int32_t> rows_;                 // sorted by group
    std::vector<const AdapterLayer*> of_row_;
    Buffer lowered_, gathered_;
    int32_t stride_ = 0;                        // space for numbers of A x per row
    int64_t depth_max_ = 0;
};

}  // namespace trioserve
