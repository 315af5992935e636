/* A team of threads from the OpenMP runtime that torch has loaded already: its entry points are handed in, so
 * that this library links against none. A second runtime's idle threads would spin against the first's. */
#ifndef ADA_TEAM_H
#define ADA_TEAM_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    int rank, size;
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

typedef struct {
    void (*work)(const team *, void *);
    void *data;
} team_job;

static void team_member(void *data) {
    const team_job *job = data;
    team t = {runtime.rank(), runtime.size()};
    job->work(&t, job->data);
}

static void team_run(void (*work)(const team *, void *), void *data, int threads) {
    team_job job = {work, data};
    if (threads > 1 && runtime.parallel) {
        runtime.parallel(team_member, &job, (unsigned)threads, 0);
    } else {
        team alone = {0, 1};
        work(&alone, data);
    }
}

#endif
