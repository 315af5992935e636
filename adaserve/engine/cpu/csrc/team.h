/* Threads that share a piece of work without ever waiting for one that has lost its core.
 *
 * Work is a row of phases that all members walk through, each phase a number of items that are claimed one by one.
 * An item is computed in private and then stored by whoever was first to finish it. So a member that is left with
 * nothing to do waits about as long as an item takes, then does what others hold once more: on a busy host a
 * phase takes no longer than the members that run now need for it. Nobody waits for a member that has not come;
 * it skips what is done meanwhile. Idle members sleep, so that they take no time from other processes. */
#ifndef ADA_TEAM_H
#define ADA_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

#define LINE 64                  /* bytes of a cache line: counters of different members stay apart */
#define MIN_PATIENCE_NS 20000  /* before others' items are done again */
#ifndef MAX_PATIENCE_NS         /* tests have none */
#define MAX_PATIENCE_NS 500000
#endif
#define AWAKE_NS 200000          /* idle members watch for work for so long, then sleep */

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- phases ---- */

typedef struct {
    int rank, size;
    char *phases; /* zeros at the start: every member finds the next phase's counters at the same place */
} team;

typedef struct {
    int items;
    int *done;      /* items that are stored */
    int *claims;    /* one a member, LINE apart */
    uint8_t *taken; /* per item: somebody stores it or has done so */
} phase;

/* What a phase does. `compute` leaves an item's result in the member's own memory, may be run by several members
 * for the same item, and may end early once `taken` is set. `store` is run by one member for each item. Either may
 * be NULL: what is not computed cannot be done again, so it must be short. */
typedef struct {
    void (*compute)(void *data, int item, const uint8_t *taken);
    void (*store)(void *data, int item);
    void *data;
} phase_work;

/* Bytes of the counters of a phase. */
static inline size_t phase_bytes(int size, int items) {
    return size == 1 ? 0 : ((size_t)LINE * (size + 1) + items + LINE - 1) / LINE * LINE;
}

static inline phase next_phase(team *t, int items) {
    char *at = t->phases;
    t->phases += phase_bytes(t->size, items);
    return (phase){items, (int *)at, (int *)(at + LINE), (uint8_t *)at + (size_t)LINE * (t->size + 1)};
}

/* The next of a phase's items, or -1. A member first takes its own share in order, so that it streams through
 * memory, then what others have left. */
static inline int claim(const team *t, const phase *p) {
    for (int i = 0; i < t->size; i++) {
        const int member = (t->rank + i) % t->size;
        const int begin = (int)((int64_t)p->items * member / t->size);
        const int count = (int)((int64_t)p->items * (member + 1) / t->size) - begin;
        int *claims = p->claims + member * (LINE / (int)sizeof(int));
        if (__atomic_load_n(claims, __ATOMIC_RELAXED) >= count) continue;
        const int mine = __atomic_fetch_add(claims, 1, __ATOMIC_RELAXED);
        if (mine < count) return begin + mine;
    }
    return -1;
}

static inline int is_taken(const uint8_t *taken) {
    return taken && __atomic_load_n(taken, __ATOMIC_RELAXED);
}

static inline void finish_item(const phase *p, const phase_work *w, int item) {
    uint8_t *taken = p->taken + item;
    if (w->compute) w->compute(w->data, item, taken);
    if (__atomic_exchange_n(taken, 1, __ATOMIC_RELAXED)) return;
    if (w->store) w->store(w->data, item);
    __atomic_fetch_add(p->done, 1, __ATOMIC_ACQ_REL);
}

static inline int all_done(const phase *p) {
    return __atomic_load_n(p->done, __ATOMIC_ACQUIRE) >= p->items;
}

static inline int wait_done(const phase *p, int64_t until_ns) {
    for (;;) {
        for (int i = 0; i < 32; i++) {
            if (all_done(p)) return 1;
            PAUSE();
        }
        if (now_ns() >= until_ns) return 0;
    }
}

/* All items of a phase; returns when they are stored, whoever did it. */
static void team_phase(team *t, int items, phase_work w) {
    if (t->size == 1) {
        for (int item = 0; item < items; item++) {
            if (w.compute) w.compute(w.data, item, NULL);
            if (w.store) w.store(w.data, item);
        }
        return;
    }
    const phase p = next_phase(t, items);
    const int64_t start = now_ns();
    int64_t mine = 0;
    for (int item = claim(t, &p); item >= 0; item = claim(t, &p), mine++) finish_item(&p, &w, item);
    if (all_done(&p)) return;
    const int64_t now = now_ns(), each = mine ? 3 * (now - start) / (2 * mine) : 0;
    const int64_t least = each < MIN_PATIENCE_NS ? MIN_PATIENCE_NS : each;
    const int64_t patience = least > MAX_PATIENCE_NS ? MAX_PATIENCE_NS : least;
    if (wait_done(&p, now + patience)) return;
    for (int i = 0; w.compute && i < items && !all_done(&p); i++) {
        const int item = (int)((i + (int64_t)items * t->rank / t->size) % items);
        if (!is_taken(p.taken + item)) finish_item(&p, &w, item);
    }
    /* What is left is being stored. */
    while (!wait_done(&p, now_ns() + MIN_PATIENCE_NS)) sched_yield();
}

/* ---- members ---- */

typedef struct {
    void (*work)(team *, void *);
    void *data;
    char *phases;
    int threads;
} team_job;

#define GATE_OPEN (1 << 30)

/* One crew serves all models of a process, one run at a time. */
static struct {
    pthread_mutex_t running;   /* held by whoever runs something */
    pthread_mutex_t sleep;
    pthread_cond_t work, left;
    int members;               /* threads started, the callers not counted */
    int sleepers;
    int epoch;                 /* of the last run */
    int gate;                  /* members inside, plus GATE_OPEN while more may enter */
    team_job job;
} crew = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          0, 0, 0, 0, {0}};

static int enter_run(int rank) {
    int gate = __atomic_load_n(&crew.gate, __ATOMIC_ACQUIRE);
    while (gate & GATE_OPEN)
        if (__atomic_compare_exchange_n(&crew.gate, &gate, gate + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return rank < crew.job.threads ? 1 : 2;
    return 0;
}

static void leave_run(void) {
    if (__atomic_sub_fetch(&crew.gate, 1, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&crew.sleep);
    pthread_cond_signal(&crew.left);
    pthread_mutex_unlock(&crew.sleep);
}

static int await_epoch(int seen) {
    const int64_t until = now_ns() + AWAKE_NS;
    int epoch;
    do {
        for (int i = 0; i < 32; i++) {
            if ((epoch = __atomic_load_n(&crew.epoch, __ATOMIC_ACQUIRE)) != seen) return epoch;
            PAUSE();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&crew.sleep);
    __atomic_fetch_add(&crew.sleepers, 1, __ATOMIC_SEQ_CST);
    while ((epoch = __atomic_load_n(&crew.epoch, __ATOMIC_SEQ_CST)) == seen) pthread_cond_wait(&crew.work, &crew.sleep);
    __atomic_fetch_sub(&crew.sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&crew.sleep);
    return epoch;
}

static void *crew_member(void *rank) {
    for (int seen = 0;;) {
        seen = await_epoch(seen);
        const int entered = enter_run((int)(intptr_t)rank);
        if (entered == 1) {
            team t = {(int)(intptr_t)rank, crew.job.threads, crew.job.phases};
            crew.job.work(&t, crew.job.data);
        }
        if (entered) leave_run();
    }
    return NULL;
}

/* A forked child has none of the threads. */
static void forget_crew(void) {
    pthread_mutex_init(&crew.running, NULL);
    pthread_mutex_init(&crew.sleep, NULL);
    pthread_cond_init(&crew.work, NULL);
    pthread_cond_init(&crew.left, NULL);
    crew.members = crew.sleepers = crew.gate = 0;
}

static void hire(int members) {
    sigset_t all, before;
    if (crew.members >= members) return;
    if (!crew.members) pthread_atfork(NULL, NULL, forget_crew);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    for (pthread_t thread; crew.members < members; crew.members++) {
        if (pthread_create(&thread, NULL, crew_member, (void *)(intptr_t)(crew.members + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void open_run(const team_job *job) {
    crew.job = *job;
    __atomic_store_n(&crew.gate, GATE_OPEN, __ATOMIC_RELEASE);
    __atomic_fetch_add(&crew.epoch, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&crew.sleepers, __ATOMIC_SEQ_CST)) return;
    pthread_mutex_lock(&crew.sleep);
    pthread_cond_broadcast(&crew.work);
    pthread_mutex_unlock(&crew.sleep);
}

/* Nobody enters any more, and who is inside has left: what the work read may go away. */
static void close_run(void) {
    if (__atomic_and_fetch(&crew.gate, ~GATE_OPEN, __ATOMIC_SEQ_CST) == 0) return;
    const int64_t until = now_ns() + MIN_PATIENCE_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (!__atomic_load_n(&crew.gate, __ATOMIC_ACQUIRE)) return;
            PAUSE();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&crew.sleep);
    while (__atomic_load_n(&crew.gate, __ATOMIC_SEQ_CST)) pthread_cond_wait(&crew.left, &crew.sleep);
    pthread_mutex_unlock(&crew.sleep);
}

/* `phases`: zeros, as many bytes as `work`'s phases take. */
static void team_run(void (*work)(team *, void *), void *data, int threads, char *phases) {
    if (threads > 1 && pthread_mutex_trylock(&crew.running) == 0) {
        hire(threads - 1);
        open_run(&(team_job){work, data, phases, threads});
        team t = {0, threads, phases};
        work(&t, data);
        close_run();
        pthread_mutex_unlock(&crew.running);
    } else {
        team alone = {0, 1, phases};
        work(&alone, data);
    }
}

#endif
