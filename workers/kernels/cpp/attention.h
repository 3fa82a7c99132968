// What the attention kernels share: the block pool of one layer, one step, and scratch memory.
#pragma once

#include <cstdlib>
#include <new>

#include "panel.h"
#include "thread_pool.h"

namespace pointsman {

// Keys (or values) of a layer: [block][token of the block][kv head][head_dim], strides in elements;
// heads of a token lie side by side. block_tokens is a multiple of 16, head_dim is even.
// Mirrored field by field in native.py.
struct Layer {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_tokens;
  int64_t block_stride;
  int64_t token_stride;
  int64_t window;        // a token sees this many, itself included; 0: all before it
  int64_t num_rotated;   // leading elements of a head that are rotated; 0: none
  bf16* keys;
  bf16* values;
  const float* query_norm;  // float32 [head_dim], or null
  const float* key_norm;
  float norm_epsilon;
  float scale;  // of the scores, times log2(e)

  int64_t group_size() const { return num_heads / num_kv_heads; }
  int64_t num_chunks() const { return (head_dim + 31) / 32; }
  int64_t padded_dim() const { return num_chunks() * 32; }
  // First position that a token at `position` sees.
  int64_t first_visible(int64_t position) const {
    return window > 0 && position >= window ? position + 1 - window : 0;
  }
};

// Mirrored field by field in native.py; the arrays are those of StepPlan.
struct Step {
  int64_t num_rows;
  int64_t table_width;
  int64_t num_prefill_spans;
  int64_t num_decode_rows;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* block_tables;
  const int32_t* prefill_spans;  // [n][3] sequence, first row, number of rows
  const int32_t* decode_rows;    // [n][2] row, sequence
  const float* rope;             // [position][cosines, sines]
};

// Offset of a token in a layer's keys or values.
inline int64_t token_offset(const Layer& layer, const int32_t* table, int64_t token) {
  return table[token / layer.block_tokens] * layer.block_stride +
         token % layer.block_tokens * layer.token_stride;
}

// Memory that grows and is kept, so that a steady state allocates nothing.
template <typename T>
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  T* get(int64_t count) {
    size_t num_bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    if (num_bytes > num_bytes_) {
      num_bytes = std::max(num_bytes, num_bytes_ / 128 * 192);  // contexts grow token by token
      std::free(data_);
      data_ = static_cast<T*>(std::aligned_alloc(64, num_bytes));
      num_bytes_ = data_ ? num_bytes : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace pointsman
