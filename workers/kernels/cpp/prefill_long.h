// Attention of many rows to their contexts, which are packed once per step: bound by multiplication.
#pragma once

#include "prefill_tile.h"

namespace pointsman {

// A span, and the tiles that its rows see.
struct LongSpan : Span {
  int64_t first_tile;
  int64_t num_tiles;

  LongSpan(const Layer& layer, const Step& step, int64_t number) : Span(step, number) {
    first_tile = layer.first_visible(position) / kTileTokens;
    num_tiles = (context_tokens() + kTileTokens - 1) / kTileTokens - first_tile;
  }
};

// Asks for the keys and values of one head and the sixteen tokens some way after `token`: pieces too
// short for a core to see a stream in them. GCC drops calls of a function that does nothing else.
inline __attribute__((always_inline)) void fetch_ahead(const Layer& layer, const Span& span,
                                                       int64_t kv_head, int64_t token) {
  constexpr int64_t kAheadTokens = 48;
  const int64_t ahead = std::min(token + kAheadTokens, (span.context_tokens() - 1) / 16 * 16);
  const int64_t offset = token_offset(layer, span.table, ahead) + kv_head * layer.head_dim;
  for (const bf16* tokens : {layer.keys + offset, layer.values + offset}) {
    for (int64_t at = 0; at < 16 * layer.token_stride; at += layer.token_stride) {
      for (int64_t element = 0; element < layer.head_dim; element += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(tokens + at + element), _MM_HINT_T0);
      }
    }
  }
}

// Some rows and one section. `tiles`: the head's, packed, from `first_tile` on.
inline void attend_section(const Rows& rows, int64_t section, const bf16* queries, const bf16* tiles,
                           int64_t first_tile, const Running& running) {
  running.clear();
  const int64_t end = std::min(rows.context_tokens(), (section + 1) * kSectionTokens);
  const int64_t begin = std::max(rows.first_visible(), section * kSectionTokens);
  for (int64_t tile = begin / kTileTokens; tile * kTileTokens < end; ++tile) {
    attend_tile(rows, tile * kTileTokens, queries,
                tiles + (tile - first_tile) * tile_size(rows.layer), running, NoFetch{});
  }
}

// Up to 12 rows and all sections of their context.
inline void attend_context(const Rows& rows, const bf16* tiles, int64_t first_tile,
                           const bf16* queries, bf16* target) {
  static thread_local Scratch<bf16> query_scratch;
  static thread_local Scratch<float> scratch;
  const Layer& layer = rows.layer;
  const int64_t size = Running::num_floats(layer);
  bf16* own_queries = query_scratch.get(kMaxRows * layer.head_dim);
  float* data = scratch.get(2 * size);
  const Running total(layer, data), part(layer, data + size);
  copy_queries(rows, queries, own_queries);
  const int64_t first = rows.first_visible() / kSectionTokens;
  attend_section(rows, first, own_queries, tiles, first_tile, total);
  for (int64_t section = first + 1; section * kSectionTokens < rows.context_tokens(); ++section) {
    attend_section(rows, section, own_queries, tiles, first_tile, part);
    merge(rows, part, total);
  }
  finish(rows, total, target);
}

// The spans of these numbers.
inline void attend_long(const Layer& layer, const Step& step, const int64_t* spans,
                        int64_t num_spans, const bf16* queries, bf16* target) {
  constexpr int64_t kFewRows = 16;  // of a step, per thread
  const bool has_few_rows = step.num_rows < kFewRows * ThreadPool::instance().num_threads();
  const int64_t rows_per_task = has_few_rows ? kMaxRows : 4 * kMaxRows;
  static thread_local Scratch<bf16> packed_scratch;
  static thread_local Scratch<int64_t> number_scratch;
  if (num_spans == 0) return;
  const int64_t kv_heads = layer.num_kv_heads;
  int64_t* tiles = number_scratch.get(2 * (num_spans + 1));  // numbers of first tiles ...
  int64_t* tasks = tiles + num_spans + 1;                    // ... and of first tasks
  tiles[0] = tasks[0] = 0;
  for (int64_t at = 0; at < num_spans; ++at) {
    const LongSpan span(layer, step, spans[at]);
    const int64_t num_rows = span.num_tokens * layer.group_size();
    tiles[at + 1] = tiles[at] + span.num_tiles * kv_heads;
    tasks[at + 1] = tasks[at] + (num_rows + rows_per_task - 1) / rows_per_task * kv_heads;
  }
  bf16* packed = packed_scratch.get(tiles[num_spans] * tile_size(layer));
  ThreadPool::instance().run(tiles[num_spans], [&](int64_t task) {
    const int64_t at = find(tiles, num_spans, task), number = task - tiles[at];
    const LongSpan span(layer, step, spans[at]);
    const int64_t kv_head = number / span.num_tiles;
    const int64_t first = (span.first_tile + number % span.num_tiles) * kTileTokens;
    pack_tile(layer, span, kv_head, first, std::min(first + kTileTokens, span.context_tokens()),
              packed + task * tile_size(layer),
              [&](int64_t token) __attribute__((always_inline)) {
                fetch_ahead(layer, span, kv_head, token);
              });
  });
  ThreadPool::instance().run(tasks[num_spans], [&](int64_t task) {
    const int64_t at = find(tasks, num_spans, task), own = task - tasks[at];
    const LongSpan span(layer, step, spans[at]);
    const int64_t kv_head = own % kv_heads, begin = own / kv_heads * rows_per_task;
    const bf16* head = packed + (tiles[at] + kv_head * span.num_tiles) * tile_size(layer);
    const int64_t end = std::min(begin + rows_per_task, span.num_tokens * layer.group_size());
    for (int64_t row = begin; row < end; row += kMaxRows) {
      attend_context(Rows(layer, span, kv_head, row, end), head, span.first_tile, queries, target);
    }
  });
}

}  // namespace pointsman
