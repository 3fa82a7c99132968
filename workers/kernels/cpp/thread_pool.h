// A pool of threads for kernels of a few microseconds to a few milliseconds.
//
// The tasks of a call are cut into one share a thread, in order, so that operators whose tasks follow
// the rows of a step find a row where they left it, in their core's own cache: between cores that
// share no cache, moving rows cost prefill a third of its time. Within shares tasks are claimed one by
// one, and who is through helps the others, so that a thread that the system has put aside delays
// only the task it holds: with OpenMP's fixed shares and barriers one busy neighbour on two cores cost
// a factor of 2 to 100. Which thread runs a task never changes its result.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pointsman {

class ThreadPool {
 public:
  // One pool per process; its threads are never joined, so nothing waits for them at exit.
  static ThreadPool& instance() {
    static ThreadPool* pool = new ThreadPool();
    return *pool;
  }

  // `num_threads` counts the caller. Threads are added when needed and then kept.
  void set_num_threads(int num_threads) {
    const std::lock_guard<std::mutex> guard(busy_);
    num_threads_ = std::clamp(num_threads, 1, kMaxThreads);
  }

  int num_threads() const { return num_threads_; }

  // Calls task(index) for each index in [0, num_tasks) and returns when all are done.
  template <typename Task>
  void run(int64_t num_tasks, const Task& task) {
    run(num_tasks, task, 1);
  }

  // The same for tasks that follow the rows of a step. The last one of a share is left to its thread
  // for some ten microseconds: mostly it comes to it sooner than the rows would come here.
  template <typename Task>
  void run_rows(int64_t num_tasks, const Task& task) {
    run(num_tasks, task, 2);
  }

 private:
  // Others help with a share that has `least_left` tasks or more.
  template <typename Task>
  void run(int64_t num_tasks, const Task& task, uint64_t least_left) {
    std::unique_lock<std::mutex> guard(busy_, std::try_to_lock);
    // A second caller at a time computes alone: slower, never wrong.
    if (!guard.owns_lock() || num_threads_ == 1 || num_tasks == 1 || num_tasks >= kMaxTasks) {
      for (int64_t index = 0; index < num_tasks; ++index) task(index);
      return;
    }
    start_threads();
    call_ = [](const void* object, int64_t index) { (*static_cast<const Task*>(object))(index); };
    object_ = &task;
    least_left_ = least_left;
    num_done_.store(0, std::memory_order_relaxed);
    ++round_;
    const int64_t num_shares = num_threads_;
    for (int64_t share = 0; share < num_shares; ++share) {
      const auto first = static_cast<uint64_t>(num_tasks * share / num_shares);
      const auto end = static_cast<uint64_t>(num_tasks * (share + 1) / num_shares);
      tickets_[share].word.store(round_ << kRoundShift | end << kEndShift | first,
                                 std::memory_order_release);
    }
    published_.store(static_cast<uint32_t>(round_), std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) published_.notify_all();
    claim_tasks(0, num_threads_, least_left);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tasks; ++spins) {
      _mm_pause();
      if (spins == kSpins / 4) claim_tasks(0, num_threads_, 1);
      if (spins > kSpins) sched_yield();
    }
  }

  static constexpr int kMaxThreads = 256;
  static constexpr int64_t kMaxTasks = 1 << 23;
  static constexpr int kSpins = 2000;  // about 50 microseconds: the gap between two operators
  static constexpr int kEndShift = 24;
  static constexpr int kRoundShift = 48;
  static constexpr uint64_t kFieldMask = (uint64_t{1} << kEndShift) - 1;

  // A share's ticket is (round, end, next index) in one word. A claim is one addition; whoever gets an
  // index below the end holds a task of a round that cannot end before the task does, so `call_` and
  // `object_` are those of that round. A late claim on an old round gets no task.
  struct alignas(64) Ticket {
    std::atomic<uint64_t> word{0};
  };

  static uint64_t num_left(uint64_t ticket) {
    const uint64_t end = (ticket >> kEndShift) & kFieldMask, next = ticket & kFieldMask;
    return next < end ? end - next : 0;
  }

  // Does tasks of the share of thread `own`, then of those others that have `least_left` or more.
  void claim_tasks(int own, int num_shares, uint64_t least_left) {
    int64_t num_done = 0;
    for (int turn = 0; turn < num_shares; ++turn) {
      std::atomic<uint64_t>& word = tickets_[(own + turn) % num_shares].word;
      while (turn == 0 || num_left(word.load(std::memory_order_relaxed)) >= least_left) {
        const uint64_t claim = word.fetch_add(1, std::memory_order_acq_rel);
        const uint64_t index = claim & kFieldMask;
        if (index >= ((claim >> kEndShift) & kFieldMask)) break;
        call_(object_, static_cast<int64_t>(index));
        ++num_done;
      }
    }
    if (num_done > 0) num_done_.fetch_add(num_done, std::memory_order_acq_rel);
  }

  void work(int number) {
    uint32_t seen = 0;
    while (true) {
      uint32_t now = published_.load(std::memory_order_acquire);
      for (int spins = 0; now == seen && spins < kSpins; ++spins) {
        _mm_pause();
        now = published_.load(std::memory_order_acquire);
      }
      if (now == seen) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        published_.wait(seen, std::memory_order_seq_cst);
        num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      seen = now;
      const int num_threads = num_threads_.load(std::memory_order_relaxed);
      if (number < num_threads) claim_tasks(number, num_threads, least_left_);
    }
  }

  void start_threads() {
    while (num_started_ < num_threads_ - 1) {
      std::thread(&ThreadPool::work, this, ++num_started_).detach();
    }
  }

  std::mutex busy_;
  std::atomic<int> num_threads_{1};
  int num_started_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* object_ = nullptr;
  std::atomic<uint64_t> least_left_{1};
  uint64_t round_ = 0;
  Ticket tickets_[kMaxThreads];
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> published_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
};

}  // namespace pointsman
