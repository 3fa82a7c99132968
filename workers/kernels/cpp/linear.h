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
template <int Rows, bool IsAlone>
__attribute__((noinline)) void sum_rows(const bf16* rows, int64_t num_inputs, const bf16* panel,
                                        const float* bias, Ahead<IsAlone> ahead,
                                        __m512 (&results)[Rows][2]) {
  for (int half = 0; half < 2; ++half) {
    const __m512 start = bias ? _mm512_loadu_ps(bias + 16 * half) : _mm512_setzero_ps();
    for (int row = 0; row < Rows; ++row) results[row][half] = start;
  }
  add_products<Rows>(rows, num_inputs, panel, num_inputs / 2, ahead, results);
}

constexpr int64_t kOwnRows = 48, kOwnInt8Rows = 16;  // measured with two threads

// How the rows and panels of a product become tasks: rows in blocks that stay in a core's own cache
// while the panels pass. Where there are enough rows, each thread has blocks of its own.
struct Tiling {
  bool has_own_rows;
  RowGroups groups;
  int64_t num_panels;
  int64_t panels_per_task;
  int64_t num_blocks;

  // `own_rows`: so many pay for reading all weights on each core. `row_bytes`: of a row's inputs.
  Tiling(const Weight& weight, int64_t num_rows, int64_t max_rows, int64_t own_rows,
         int64_t row_bytes)
      : Tiling(weight, num_rows, max_rows, row_bytes, ThreadPool::instance().num_threads(),
               num_rows >= own_rows * ThreadPool::instance().num_threads()) {}
  int64_t tasks_per_block() const { return (num_panels + panels_per_task - 1) / panels_per_task; }

 private:
  Tiling(const Weight& weight, int64_t num_rows, int64_t max_rows, int64_t row_bytes,
         int64_t num_threads, bool own_rows)
      : has_own_rows(own_rows),
        groups(num_rows, max_rows, own_rows ? num_threads : 1),
        num_panels((weight.num_columns + kPanelColumns - 1) / kPanelColumns),
        panels_per_task(std::max<int64_t>(1, num_panels / (16 * num_threads))) {
    constexpr int64_t kBlockBytes = 256 << 10;
    const int64_t groups_per_block = std::max<int64_t>(1, kBlockBytes / (max_rows * row_bytes));
    num_blocks = (groups.count + groups_per_block - 1) / groups_per_block;
    if (own_rows) num_blocks = (num_blocks + num_threads - 1) / num_threads * num_threads;
  }
};

// Calls sum.template operator()<Rows, IsAlone>(first row, panel, ahead, sums), then finish for each
// row, for each panel and each group of rows.
template <typename Sum, typename Finish>
void for_each_panel(const Tiling& tiling, const Weight& weight, int64_t panel_bytes,
                    const Sum& sum, const Finish& finish) {
  const RowGroups& groups = tiling.groups;
  const auto run_group = [&]<bool IsAlone>(int64_t panel, int64_t group, Ahead<IsAlone> ahead) {
    const int64_t first = groups.first(group), column = panel * kPanelColumns;
    with_rows(static_cast<int>(groups.size(group)), [&]<int Rows>() {
      __m512 sums[Rows][2];
      sum.template operator()<Rows, IsAlone>(first, panel, ahead, sums);
      for (int row = 0; row < Rows; ++row) {
        finish(first + row, column, weight.num_columns - column, sums[row][0], sums[row][1]);
      }
    });
  };
  const int64_t num_slices = (weight.num_inputs + kSliceInputs - 1) / kSliceInputs;
  const int64_t tasks_per_block = tiling.tasks_per_block();
  const auto run_task = [&](int64_t task) {
    const int64_t block = task / tasks_per_block;
    const int64_t begin = groups.count * block / tiling.num_blocks;
    const int64_t end = groups.count * (block + 1) / tiling.num_blocks;
    const int64_t first = task % tasks_per_block * tiling.panels_per_task;
    const int64_t last = std::min(tiling.num_panels, first + tiling.panels_per_task);
    for (int64_t panel = first; panel < last; ++panel) {
      const char* own = static_cast<const char*>(weight.panels) + panel * panel_bytes;
      if (end - begin == 1) {
        run_group(panel, begin, Ahead<true>(own, panel_bytes, num_slices, 0, 1));
        continue;
      }
      for (int64_t group = begin; group < end; ++group) {
        const int64_t share = group - begin;
        run_group(panel, group, Ahead<false>(own, panel_bytes, num_slices, share, end - begin));
      }
    }
  };
  const int64_t num_tasks = tiling.num_blocks * tasks_per_block;
  if (tiling.has_own_rows) {
    ThreadPool::instance().run_rows(num_tasks, run_task);
  } else {
    ThreadPool::instance().run(num_tasks, run_task);
  }
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
    const int64_t width = (num_inputs + kSliceInputs - 1) / kSliceInputs * kSliceInputs;
    const Tiling tiling(weight, num_rows, kMaxInt8Rows, kOwnInt8Rows, width);
    const Int8Rows rows = round_rows(tiling.groups, inputs, num_inputs);
    const auto* panels = static_cast<const uint8_t*>(weight.panels);
    for_each_panel(
        tiling, weight, width * kPanelColumns,
        [&]<int Rows, bool IsAlone>(int64_t first, int64_t panel, Ahead<IsAlone> ahead,
                                    __m512 (&sums)[Rows][2]) {
          sum_int8_rows<Rows>(rows, first, panels + panel * width * kPanelColumns,
                              weight.scales + panel * kPanelColumns, bias_of(panel), ahead, sums);
        },
        finish);
    return;
  }
  constexpr int64_t kInputBytes = sizeof(bf16);
  const Tiling tiling(weight, num_rows, kMaxRows, kOwnRows, num_inputs * kInputBytes);
  const auto* panels = static_cast<const bf16*>(weight.panels);
  for_each_panel(
      tiling, weight, num_inputs * kPanelColumns * kInputBytes,
      [&]<int Rows, bool IsAlone>(int64_t first, int64_t panel, Ahead<IsAlone> ahead,
                                  __m512 (&sums)[Rows][2]) {
        sum_rows<Rows>(inputs + first * num_inputs, num_inputs,
                       panels + panel * num_inputs * kPanelColumns, bias_of(panel), ahead, sums);
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
  ThreadPool::instance().run_rows(num_tasks, [&](int64_t task) {
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
