// Memory that grows to the size of the largest step and is reused.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace trioserve {

// Memory that is never written stays zero, so ends of rows that are not written are zero padding.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(memory_); }

    template <class T>
    T* of(int64_t count) {
        const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > bytes_) {
            std::free(memory_);
            bytes_ = 0;
            memory_ = std::aligned_alloc(64, bytes + bytes / 4 / 64 * 64);
            if (memory_ == nullptr) throw std::bad_alloc();
            bytes_ = bytes + bytes / 4 / 64 * 64;
            std::memset(memory_, 0, bytes_);
        }
        return static_cast<T*>(memory_);
    }

private:
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace trioserve
