#include "thread_block.h"

Index threadIdx, blockDim;
ThreadBlock *ThreadBlock::block;

ThreadBlock::ThreadBlock(unsigned count, unsigned seed, std::function<void()> kernel)
    : kernel(std::move(kernel)), threads(count), warps(count / 32) {
    block = this;
    blockDim.x = count;
    for (Thread &thread : threads) {
        thread.stack.resize(STACK_BYTES);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, &ThreadBlock::start, 0);
    }
    std::mt19937 random(seed);
    for (unsigned done = 0; done < count;) {
        const unsigned first = random() % count;
        for (unsigned n = 0; n < count; n++) {
            threadIdx.x = (first + n) % count;
            Thread &thread = threads[threadIdx.x];
            if (thread.is_done) continue;
            swapcontext(&scheduler, &thread.context);
            done += thread.is_done;
        }
    }
}

void ThreadBlock::start() {
    block->kernel();
    block->threads[threadIdx.x].is_done = true;
}

void ThreadBlock::give_way() {
    const unsigned self = threadIdx.x;
    swapcontext(&threads[self].context, &scheduler);
}

unsigned ThreadBlock::meet(Meeting &meeting, unsigned count) {
    const unsigned round = meeting.rounds;
    if (++meeting.here == count) meeting.here = 0, meeting.rounds++;
    while (meeting.rounds == round) give_way();
    return round;
}

void ThreadBlock::await_block() { meet(all, static_cast<unsigned>(threads.size())); }

ThreadBlock::Lanes ThreadBlock::exchange(std::uint64_t x) {
    Meeting &warp = warps[threadIdx.x / 32];
    warp.brought[warp.rounds % 2][threadIdx.x % 32] = x;
    return warp.brought[meet(warp, 32) % 2];
}
