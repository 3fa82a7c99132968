// Linear layers over packed weights, and the two row-wise operators around them.
#pragma once

#include <cmath>

#include "int8.h"
#include "panel.h"
#include "thread_pool.h"

namespace pointsman {

// What becomes of a row's 32 sums. `columns`: how many of them are real, at `column` of the row.
struct Store {
  float* target;
  int64_t stride;
  void operator()(int64_t row, int64_t column, int64_t columns, __m512 left, __m512 right) const {
    float* at = target + row * stride + column;
    _mm512_mask_storeu_ps(at, mask16(columns), left);
    _mm512_mask_storeu_ps(at + 16, mask16(columns - 16), right);
  }
};

struct Add {
  float* target;
  int64_t stride;
  void operator()(int64_t row, int64_t column, int64_t columns, __m512 left, __m512 right) const {
    float* at = target + row * stride + column;
    const __mmask16 first = mask16(columns), second = mask16(columns - 16);
    left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(first, at));
    right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(second, at + 16));
    _mm512_mask_storeu_ps(at, first, left);
    _mm512_mask_storeu_ps(at + 16, second, right);
  }
};

// A panel holds 16 gates and the 16 values they gate; silu(gate) * value is one result.
struct Gate {
  bf16* target;
  int64_t stride;
  void operator()(int64_t row, int64_t column, int64_t columns, __m512 left, __m512 right) const {
    store_narrow(target + row * stride + column / 2, mask16(columns / 2),
                 _mm512_mul_ps(silu(left), right));
  }
};

// Panels of 32 columns over num_inputs, zeros after num_columns; float32 bias of all panels, or
// null. With float32 `scales` of all columns the panels are int8 (see int8.h), else bf16. A gated
// layer counts gates and gated values as columns.
// Mirrored field by field in native_machine.py, as Norm and Table are.
struct Weight {
  int64_t num_inputs;
  int64_t num_columns;
  const void* panels;
  const float* bias;
  const float* scales;
};

// Sums of some rows over one panel, from its bias on. A function of its own: inlined, the constants
// of what becomes of the sums would take registers from them, a third of the speed (measured).
template <int Rows, bool Streams>
__attribute__((noinline)) void sum_rows(const bf16* rows, int64_t num_inputs, const bf16* pairs,
                                        const float* bias, __m512 (&results)[Rows][2]) {
  const __m512 left = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  const __m512 right = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
  __m512 sums[Rows][2];
  for (int row = 0; row < Rows; ++row) sums[row][0] = left, sums[row][1] = right;
  add_products<Rows, Streams>(rows, num_inputs, pairs, num_inputs / 2, sums);
  for (int row = 0; row < Rows; ++row) {
    results[row][0] = sums[row][0];
    results[row][1] = sums[row][1];
  }
}

// Calls sum.template operator()<Rows, Streams>(first row, panel, sums), then finish for each row, for
// each panel and each group of at most 12 rows; groups are of nearly equal size. `row_bytes`: of a
// row's inputs. Rows are taken in blocks that stay in a core's own cache while the panels pass; where
// there are enough of them, each thread has rows of its own.
template <typename Sum, typename Finish>
void for_each_panel(int64_t num_columns, int64_t num_rows, int64_t row_bytes, const Sum& sum,
                    const Finish& finish) {
  constexpr int64_t kBlockBytes = 256 << 10;
  constexpr int64_t kOwnRows = 48;  // so many pay for reading all weights on each core
  const RowGroups groups(num_rows);
  const int64_t groups_per_block = std::max<int64_t>(1, kBlockBytes / (kMaxRows * row_bytes));
  const int64_t num_panels = (num_columns + kPanelColumns - 1) / kPanelColumns;
  ThreadPool& pool = ThreadPool::instance();
  const int64_t num_threads = pool.num_threads();
  int64_t num_blocks = (groups.count + groups_per_block - 1) / groups_per_block;
  if (num_rows >= kOwnRows * num_threads) {
    num_blocks = (num_blocks + num_threads - 1) / num_threads * num_threads;
  }
  const int64_t panels_per_task = std::max<int64_t>(1, num_panels / (16 * num_threads));
  const int64_t tasks_per_block = (num_panels + panels_per_task - 1) / panels_per_task;
  const auto run_group = [&](int64_t panel, int64_t group, bool is_first) {
    const int64_t first = groups.first(group);
    const int64_t column = panel * kPanelColumns;
    with_rows(static_cast<int>(groups.first(group + 1) - first), [&]<int Rows>() {
      __m512 sums[Rows][2];
      if (is_first) {  // the panel comes from memory
        sum.template operator()<Rows, true>(first, panel, sums);
      } else {
        sum.template operator()<Rows, false>(first, panel, sums);
      }
      for (int row = 0; row < Rows; ++row) {
        finish(first + row, column, num_columns - column, sums[row][0], sums[row][1]);
      }
    });
  };
  pool.run(num_blocks * tasks_per_block, [&](int64_t task) {
    const int64_t block = task / tasks_per_block, share = task % tasks_per_block;
    const int64_t first = groups.count * block / num_blocks;
    const int64_t end = groups.count * (block + 1) / num_blocks;
    const int64_t last = std::min(num_panels, (share + 1) * panels_per_task);
    for (int64_t panel = share * panels_per_task; panel < last; ++panel) {
      for (int64_t group = first; group < end; ++group) run_group(panel, group, group == first);
    }
  });
}

// Calls finish for each row of `inputs`, bf16 [num_rows][num_inputs], and each panel.
template <typename Finish>
void multiply(const Weight& weight, int64_t num_rows, const bf16* inputs, const Finish& finish) {
  if (num_rows == 0) return;
  const int64_t num_inputs = weight.num_inputs;
  const auto bias_of = [&](int64_t panel) {
    return weight.bias ? weight.bias + panel * kPanelColumns : nullptr;
  };
  if (weight.scales) {
    const Int8Rows rows = round_rows(inputs, num_rows, num_inputs);
    const int64_t width = rows.num_groups * kGroupInputs;
    const auto* panels = static_cast<const uint8_t*>(weight.panels);
    for_each_panel(
        weight.num_columns, num_rows, width,
        [&]<int Rows, bool Streams>(int64_t first, int64_t panel, __m512 (&sums)[Rows][2]) {
          sum_int8_rows<Rows, Streams>(rows, first, panels + panel * width * kPanelColumns,
                                       weight.scales + panel * kPanelColumns, bias_of(panel), sums);
        },
        finish);
    return;
  }
  const auto* panels = static_cast<const bf16*>(weight.panels);
  for_each_panel(
      weight.num_columns, num_rows, num_inputs * static_cast<int64_t>(sizeof(bf16)),
      [&]<int Rows, bool Streams>(int64_t first, int64_t panel, __m512 (&sums)[Rows][2]) {
        sum_rows<Rows, Streams>(inputs + first * num_inputs, num_inputs,
                                panels + panel * num_inputs * kPanelColumns, bias_of(panel), sums);
      },
      finish);
}

struct Norm {
  int64_t width;
  const float* weight;
  float epsilon;
};

// target = rows / root mean square * weight, in bf16.
inline void rms_norm(const Norm& norm, int64_t num_rows, const float* rows, bf16* target) {
  const int64_t width = norm.width;
  constexpr int64_t kRowsPerTask = 8;
  const int64_t num_tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  ThreadPool::instance().run(num_tasks, [&](int64_t task) {
    const int64_t last = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < last; ++row) {
      const float* source = rows + row * width;
      __m512 squares = _mm512_setzero_ps();
      for (int64_t at = 0; at < width; at += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(mask16(width - at), source + at);
        squares = _mm512_fmadd_ps(values, values, squares);
      }
      const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + norm.epsilon));
      for (int64_t at = 0; at < width; at += 16) {
        const __mmask16 mask = mask16(width - at);
        const __m512 values = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, source + at), scale);
        store_narrow(target + row * width + at, mask,
                     _mm512_mul_ps(values, _mm512_maskz_loadu_ps(mask, norm.weight + at)));
      }
    }
  });
}

struct Table {
  int64_t width;
  const bf16* rows;
};

// target[row] = table[ids[row]], widened to float32.
inline void embed(const Table& table, int64_t num_rows, const int64_t* ids, float* target) {
  const int64_t width = table.width;
  for (int64_t row = 0; row < num_rows; ++row) {
    const bf16* source = table.rows + ids[row] * width;
    for (int64_t at = 0; at < width; at += 16) {
      const __mmask16 mask = mask16(width - at);
      const __m256i values = _mm256_maskz_loadu_epi16(mask, source + at);
      _mm512_mask_storeu_ps(target + row * width + at, mask, widen(values));
    }
  }
}

}  // namespace pointsman
