// The one matrix kernel: a few rows times a panel of 32 columns. Weights, keys and values are all
// packed into panels, [pairs of inputs][32 columns][2], so linear layers and prefill attention
// share it.
//
// Each element is summed over the pairs in order, whatever the number of rows: a row's result does
// not depend on the rows computed with it.
#pragma once

#include "vector_math.h"

namespace pointsman {

constexpr int kPanelColumns = 32;
constexpr int kMaxRows = 12;  // 24 of the 32 registers hold sums
// Panels are asked for so far ahead: with 2 KiB a core waited a fourth of its time at 8 rows.
constexpr int64_t kAheadBytes = 8 << 10;

// Rows in groups of at most kMaxRows, all of nearly equal size.
struct RowGroups {
  explicit RowGroups(int64_t of_rows)
      : num_rows(of_rows), count((of_rows + kMaxRows - 1) / kMaxRows) {}

  int64_t num_rows;
  int64_t count;
  int64_t first(int64_t group) const { return num_rows * group / count; }
};

template <int Rows, bool Streams = false>
inline __attribute__((always_inline)) void add_products(const bf16* rows, int64_t row_stride,
                                                        const bf16* panel, int64_t num_pairs,
                                                        __m512 (&sums)[Rows][2]) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const bf16* columns = panel + pair * 2 * kPanelColumns;
    if constexpr (Streams) {  // the panel comes from memory
      const char* ahead = reinterpret_cast<const char*>(columns) + kAheadBytes;
      _mm_prefetch(ahead, _MM_HINT_T0);
      _mm_prefetch(ahead + 64, _MM_HINT_T0);
    }
    const __m512bh left = (__m512bh)_mm512_loadu_si512(columns);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(columns + 32);
    for (int row = 0; row < Rows; ++row) {
      const __m512bh inputs = broadcast_pair(rows + row * row_stride + 2 * pair);
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], inputs, left);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], inputs, right);
    }
  }
}

// Calls body.template operator()<n>() for a number of rows known only at run time.
template <typename Body>
inline void with_rows(int num_rows, Body&& body) {
  switch (num_rows) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    case 3: return body.template operator()<3>();
    case 4: return body.template operator()<4>();
    case 5: return body.template operator()<5>();
    case 6: return body.template operator()<6>();
    case 7: return body.template operator()<7>();
    case 8: return body.template operator()<8>();
    case 9: return body.template operator()<9>();
    case 10: return body.template operator()<10>();
    case 11: return body.template operator()<11>();
    default: return body.template operator()<12>();
  }
}

}  // namespace pointsman
