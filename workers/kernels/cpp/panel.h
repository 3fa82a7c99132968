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
constexpr int64_t kSliceInputs = 64;  // panels are asked for, and int8 rows rounded, in slices

// Rows in groups of at most `max_rows`, all of nearly equal size.
struct RowGroups {
  // `multiple`: of so many groups, where there are as many rows.
  RowGroups(int64_t of_rows, int64_t max_rows, int64_t multiple = 1) : num_rows(of_rows) {
    count = (of_rows + max_rows - 1) / max_rows;
    if (of_rows >= multiple) count = (count + multiple - 1) / multiple * multiple;
  }

  int64_t num_rows;
  int64_t count;
  int64_t first(int64_t group) const { return num_rows * group / count; }
  int64_t size(int64_t group) const { return first(group + 1) - first(group); }
};

// What to ask memory for while a panel is multiplied. Where several groups of rows take a panel in
// turns, each asks for its share of the next one, a little before each slice: so memory is read all
// the time, and not in bursts for which the first group waits. One group alone asks step by step and
// not far ahead: with 2 KiB a core waited a fourth of its time at 8 rows, and asking before each
// slice cost as much.
template <bool IsAlone>
struct Ahead {
  const char* at = nullptr;
  int64_t lines_per_slice = 0;

  Ahead() = default;
  Ahead(const char* panel, int64_t panel_bytes, int64_t num_slices, int64_t group,
        int64_t num_groups) {
    constexpr int64_t kAheadBytes = 8 << 10;
    lines_per_slice = panel_bytes / (64 * num_slices * num_groups) + 1;
    at = panel + (IsAlone ? kAheadBytes : panel_bytes + group * num_slices * lines_per_slice * 64);
  }
  void before_slice() {
    if constexpr (!IsAlone) ask(lines_per_slice);
  }
  void before_step() {
    if constexpr (IsAlone) ask(2);
  }

 private:
  void ask(int64_t num_lines) {
    for (int64_t line = 0; line < num_lines; ++line, at += 64) _mm_prefetch(at, _MM_HINT_T0);
  }
};

// Where there is nothing to ask for.
struct NoFetch {
  void before_slice() {}
  void before_step() {}
};

// Adds the products of some pairs of inputs. `fetch` asks memory for what comes next, as `Ahead` does.
template <int Rows, typename Fetch>
inline __attribute__((always_inline)) void add_products(const bf16* rows, int64_t row_stride,
                                                        const bf16* panel, int64_t num_pairs,
                                                        Fetch&& fetch,
                                                        __m512 (&results)[Rows][2]) {
  Floats sums[Rows][2];
  for (int row = 0; row < Rows; ++row) {
    sums[row][0] = (Floats)results[row][0];
    sums[row][1] = (Floats)results[row][1];
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (pair % (kSliceInputs / 2) == 0) fetch.before_slice();
    fetch.before_step();
    const bf16* columns = panel + pair * 2 * kPanelColumns;
    const __m512bh left = (__m512bh)_mm512_loadu_si512(columns);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(columns + 32);
    for (int row = 0; row < Rows; ++row) {
      const __m512bh inputs = broadcast_pair(rows + row * row_stride + 2 * pair);
      sums[row][0] = (Floats)_mm512_dpbf16_ps((__m512)sums[row][0], inputs, left);
      sums[row][1] = (Floats)_mm512_dpbf16_ps((__m512)sums[row][1], inputs, right);
    }
  }
  for (int row = 0; row < Rows; ++row) {
    results[row][0] = (__m512)sums[row][0];
    results[row][1] = (__m512)sums[row][1];
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
