/* A team of threads from the OpenMP runtime that torch has loaded already: its entry points are handed in, so
 * that this library links against none. A second runtime's idle threads would spin against the first's. */
#ifndef ADA_TEAM_H
#define ADA_TEAM_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    int rank, size;
    int *counters; /* `size` for each phase whose items are claimed, zero at the start */
    int phase;     /* every member walks through the same phases */
} team;

typedef struct {
    void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
    void (*barrier)(void);
    int (*rank)(void);
    int (*size)(void);
} team_runtime;

static team_runtime runtime;

EXPORT void ada_set_runtime(void *parallel, void *barrier, void *rank, void *size) {
    runtime.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    runtime.barrier = (void (*)(void))barrier;
    runtime.rank = (int (*)(void))rank;
    runtime.size = (int (*)(void))size;
}

static inline void team_barrier(const team *t) {
    if (t->size > 1) runtime.barrier();
}

/* This member's share [begin, end) of `items`. */
static inline void team_share(const team *t, int items, int *begin, int *end) {
    *begin = (int)((int64_t)items * t->rank / t->size);
    *end = (int)((int64_t)items * (t->rank + 1) / t->size);
}

/* Claims of the team's next phase, one counter a member. */
static inline int *team_claims(team *t) {
    return t->counters + t->size * t->phase++;
}

/* The next of a phase's `items`, or -1. A member first takes its own share in order, so that it streams through
 * memory, then what others have left: one that loses its core to another process for a while does less instead of
 * holding up the rest. */
static inline int claim(const team *t, int *claims, int items) {
    for (int i = 0; i < t->size; i++) {
        const int member = (t->rank + i) % t->size;
        const int begin = (int)((int64_t)items * member / t->size);
        const int count = (int)((int64_t)items * (member + 1) / t->size) - begin;
        if (__atomic_load_n(claims + member, __ATOMIC_RELAXED) >= count) continue;
        const int mine = __atomic_fetch_add(claims + member, 1, __ATOMIC_RELAXED);
        if (mine < count) return begin + mine;
    }
    return -1;
}

typedef struct {
    void (*work)(team *, void *);
    void *data;
    int *counters;
} team_job;

static void team_member(void *data) {
    const team_job *job = data;
    team t = {runtime.rank(), runtime.size(), job->counters, 0};
    job->work(&t, job->data);
}

/* `counters`: zeros, `threads` for each phase of `work`. */
static void team_run(void (*work)(team *, void *), void *data, int threads, int *counters) {
    team_job job = {work, data, counters};
    if (threads > 1 && runtime.parallel) {
        runtime.parallel(team_member, &job, (unsigned)threads, 0);
    } else {
        team alone = {0, 1, counters, 0};
        work(&alone, data);
    }
}

#endif
