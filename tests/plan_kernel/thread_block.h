// A thread block on the CPU, whose threads are fibers. One runs at a time, until it waits for its warp or for the block.
#pragma once
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

struct Index {
    unsigned x;
};
extern Index threadIdx, blockDim;

class ThreadBlock {
public:
    using Lanes = std::array<std::uint64_t, 32>;

    // Runs a kernel in so many threads, which wake up in an order that the seed draws.
    ThreadBlock(unsigned threads, unsigned seed, std::function<void()> kernel);

    static ThreadBlock &running() { return *block; }

    // Until all threads of the block are here.
    void await_block();
    // Until all threads of the warp are here; what each of them brought.
    Lanes exchange(std::uint64_t x);

    template <class T>
    T of_lane(T value, unsigned lane) {
        static_assert(sizeof(T) <= sizeof(std::uint64_t));
        std::uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof value);
        bits = exchange(bits)[lane];
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

private:
    static constexpr std::size_t STACK_BYTES = 1 << 17;

    // Where threads wait for one another, again and again. Two rounds of what they bring: who is late reads the last one while
    // others are in the next.
    struct Meeting {
        unsigned here = 0, rounds = 0;
        Lanes brought[2] = {};
    };
    struct Thread {
        ucontext_t context;
        std::vector<char> stack;
        bool is_done = false;
    };

    static void start();
    // Waits at the meeting until so many threads are there; the number of the round.
    unsigned meet(Meeting &meeting, unsigned threads);
    void give_way();

    static ThreadBlock *block;

    std::function<void()> kernel;
    std::vector<Thread> threads;
    std::vector<Meeting> warps;
    Meeting all;
    ucontext_t scheduler;
};
