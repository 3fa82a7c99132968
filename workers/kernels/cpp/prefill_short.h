// Attention of few rows: bound by reading their contexts, as decode is. A tile is packed when its turn
// comes and used from the core's own cache, while the next one is on its way from memory.
#pragma once

#include "prefill_tile.h"

namespace pointsman {

// The sections of its context that a span sees, and the groups of up to 12 rows of all kv heads.
struct ShortSpan : Span {
  int64_t num_rows;  // of a head
  int64_t groups_per_head;
  int64_t num_groups;
  int64_t first_section;
  int64_t num_sections;

  ShortSpan(const Layer& layer, const Step& step, int64_t number) : Span(step, number) {
    num_rows = num_tokens * layer.group_size();
    groups_per_head = (num_rows + kMaxRows - 1) / kMaxRows;
    num_groups = groups_per_head * layer.num_kv_heads;
    first_section = layer.first_visible(position) / kSectionTokens;
    num_sections = (context_tokens() + kSectionTokens - 1) / kSectionTokens - first_section;
  }
  Rows group(const Layer& layer, int64_t number) const {
    return Rows(layer, *this, number / groups_per_head, number % groups_per_head * kMaxRows, num_rows);
  }
};

// Asks memory for keys and then values of all heads, tile by tile: for a tile's lines while the one
// before it is packed and multiplied, some before each step. All at once would fill the queue of
// outstanding reads and stop the sums.
class TileFetch {
 public:
  // From a tile that begins at `first` to the one that holds the token before `end`.
  TileFetch(const Layer& layer, const ShortSpan& span, int64_t first, int64_t end)
      : layer_(layer), table_(span.table), tile_(first), token_(first), end_(end) {
    lines_per_tile_ = 2 * kTileTokens * layer.token_stride / 32;
    const int64_t steps_per_tile =
        span.num_groups * kTileTokens / 32 * (layer.head_dim / 2 + 16 * layer.num_chunks());
    lines_per_step_ = (lines_per_tile_ + steps_per_tile - 1) / steps_per_tile;
    enter_run();
  }
  // The first tile's keys come late, however early they are asked for.
  void ask_for_keys() { ask(lines_per_tile_ / 2); }
  void begin_tile() { lines_left_ = lines_per_tile_; }
  void before_sixteen() { ask_for_some(layer_.head_dim / 4); }
  void before_slice() {}
  __attribute__((always_inline)) void before_step() { ask_for_some(lines_per_step_); }

 private:
  __attribute__((always_inline)) void ask_for_some(int64_t num_lines) {
    if (lines_left_ <= 0) return;
    lines_left_ -= num_lines;
    ask(num_lines);
  }
  // A call would spill the sums that are under way.
  __attribute__((always_inline)) void ask(int64_t num_lines) {
    for (int64_t line = 0; line < num_lines; ++line) {
      _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T0);
      at_ += 32;
      if (at_ >= run_end_) next_run();
    }
  }
  // A run is 16 tokens, which lie side by side.
  void enter_run() {
    at_ = (is_at_values_ ? layer_.values : layer_.keys) + token_offset(layer_, table_, token_);
    run_end_ = at_ + 16 * layer_.token_stride;
  }
  __attribute__((noinline)) void next_run() {
    token_ += 16;
    if (token_ >= end_ || token_ % kTileTokens == 0) {
      if (is_at_values_ && token_ < end_) tile_ = token_;
      is_at_values_ = !is_at_values_;
      token_ = tile_;
    }
    enter_run();
  }

  const Layer& layer_;
  const int32_t* table_;
  int64_t lines_per_tile_;
  int64_t lines_per_step_;
  int64_t lines_left_ = 0;
  int64_t tile_;
  int64_t token_;
  int64_t end_;
  bool is_at_values_ = false;
  const bf16* at_;
  const bf16* run_end_;
};

// All rows of a span and one section. `results`: Running::num_floats for each group of rows.
inline void attend_section(const Layer& layer, const ShortSpan& span, int64_t section,
                           const bf16* queries, float* results) {
  static thread_local Scratch<bf16> query_scratch, tile_scratch;
  const int64_t size = Running::num_floats(layer), query_size = kMaxRows * layer.head_dim;
  bf16* own_queries = query_scratch.get(span.num_groups * query_size);
  bf16* packed = tile_scratch.get(tile_size(layer));
  for (int64_t group = 0; group < span.num_groups; ++group) {
    copy_queries(span.group(layer, group), queries, own_queries + group * query_size);
    Running(layer, results + group * size).clear();
  }
  const int64_t first = section * kSectionTokens, context = span.context_tokens();
  const int64_t end = std::min(context, first + kSectionTokens);
  int64_t tile = std::max(first, layer.first_visible(span.position) / kTileTokens * kTileTokens);
  TileFetch fetch(layer, span, tile, std::min(context, end + kTileTokens));
  fetch.ask_for_keys();
  for (; tile < end; tile += kTileTokens) {
    fetch.begin_tile();
    for (int64_t group = 0; group < span.num_groups; ++group) {
      const Rows rows = span.group(layer, group);
      if (group % span.groups_per_head == 0) {
        pack_tile(layer, span, rows.kv_head, tile, std::min(end, tile + kTileTokens), packed,
                  [&](int64_t) { fetch.before_sixteen(); });
      }
      attend_tile(rows, tile, own_queries + group * query_size, packed,
                  Running(layer, results + group * size), fetch);
    }
  }
}

// The spans of these numbers: sections are shared out among the threads, and then merged.
inline void attend_short(const Layer& layer, const Step& step, const int64_t* spans,
                         int64_t num_spans, const bf16* queries, bf16* target) {
  static thread_local Scratch<int64_t> number_scratch;
  static thread_local Scratch<float> result_scratch;
  if (num_spans == 0) return;
  int64_t* sections = number_scratch.get(3 * (num_spans + 1));  // numbers of first sections,
  int64_t* groups = sections + num_spans + 1;                   // of first groups of rows,
  int64_t* results = groups + num_spans + 1;                    // and of first results
  sections[0] = groups[0] = results[0] = 0;
  for (int64_t at = 0; at < num_spans; ++at) {
    const ShortSpan span(layer, step, spans[at]);
    sections[at + 1] = sections[at] + span.num_sections;
    groups[at + 1] = groups[at] + span.num_groups;
    results[at + 1] = results[at] + span.num_sections * span.num_groups;
  }
  const int64_t size = Running::num_floats(layer);
  float* data = result_scratch.get(results[num_spans] * size);
  ThreadPool::instance().run(sections[num_spans], [&](int64_t task) {
    const int64_t at = find(sections, num_spans, task), number = task - sections[at];
    const ShortSpan span(layer, step, spans[at]);
    attend_section(layer, span, span.first_section + number, queries,
                   data + (results[at] + number * span.num_groups) * size);
  });
  ThreadPool::instance().run(groups[num_spans], [&](int64_t task) {
    const int64_t at = find(groups, num_spans, task), number = task - groups[at];
    const ShortSpan span(layer, step, spans[at]);
    const Rows rows = span.group(layer, number);
    float* first = data + (results[at] + number) * size;
    const Running total(layer, first);
    for (int64_t section = 1; section < span.num_sections; ++section) {
      merge(rows, Running(layer, first + section * span.num_groups * size), total);
    }
    finish(rows, total, target);
  });
}

}  // namespace pointsman
