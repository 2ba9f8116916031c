/* Kernels one after another, each in parts that threads share: one section for a whole stretch of a program in which nothing moves.
 *
 * The caller makes a step known and works on it with the others; nobody makes a task. Each thread has a shelf of parts, a share of
 * the step that is the same fraction in every step, so that it finds in its cache what it wrote before (its home); when its shelf
 * is empty, it takes from the others'. A step of one part is the caller's. Threads without work look for some for a while, then
 * sleep. What is computed does not depend on who does which part, nor on how many threads there are.
 *
 * Sharing a step out pays where it takes long enough, and waking who shares it where all such steps do. How long a step takes
 * is an estimate at first; short ones are the caller's in the first runs, and timed.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "conv.h"

enum { MOST_THREADS = 256, PAUSES = 64, TIMED = 2, EACH = 4 }; /* EACH: parts for a thread; one that comes late leaves few */
/* Nanoseconds, as seen on x86 cores with AVX2. */
static const int64_t PATIENCE = 50000; /* of looking for work, or for the end of a step, before sleeping */
static const int64_t LEAST = 4000;     /* of a part: less is spent on taking it */
static const int64_t ALONE = 12000;    /* of a step that is the caller's */
static const int64_t WAKING = 50000;   /* of all steps that are shared: less is spent on waking another thread */
static const int64_t LONG = 1000000;   /* of a step whose estimate is near enough */

typedef struct {
    void (*kernel)(const void *sizes, const void *buffers, int64_t part, int64_t parts);
    const void *sizes;
    const void *buffers;
    int64_t units; /* as many parts as there may be */
    int64_t nanoseconds; /* that it takes one thread */
    int64_t timed; /* runs in which it was the caller's, to see how long it takes */
    int64_t parts; /* of the run that is being done */
} Step;

/* A shelf in one word, so that what is taken is of the step that is meant: (step, end, next), of 24, 20 and 20 bits. */
typedef struct { _Alignas(64) atomic_uint_least64_t parts; } Shelf;
INLINE uint64_t shelf_of(int64_t step, Range parts) { return (uint64_t)step << 40 | (uint64_t)parts.end << 20 | (uint64_t)parts.begin; }
enum { MOST_STEPS = 1 << 24, MOST_PARTS = 1 << 20 };

static struct {
    const Step *steps;
    Shelf shelf[MOST_THREADS];
    _Alignas(64) atomic_int_least64_t left; /* parts of the step that are not done */
    _Alignas(64) atomic_int_least64_t known; /* steps that were ever made known: who sleeps waits for another one */
    atomic_int threads, sleeping, waiting, busy;
    int made; /* threads that exist, beside the callers */
    pthread_mutex_t mutex;
    pthread_cond_t more, done;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

INLINE void breathe(void) {
    for (int i = 0; i < PAUSES; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

/* Take a part from a shelf and do it; whether there was one. What is taken keeps its step, and so the table of steps, alive. */
static int take(Shelf *shelf) {
    uint64_t found = atomic_load(&shelf->parts);
    do {
        if ((found & (MOST_PARTS - 1)) >= (found >> 20 & (MOST_PARTS - 1))) return 0;
    } while (!atomic_compare_exchange_weak(&shelf->parts, &found, found + 1));
    const Step *s = pool.steps + (found >> 40);
    s->kernel(s->sizes, s->buffers, (int64_t)(found & (MOST_PARTS - 1)), s->parts);
    if (atomic_fetch_sub(&pool.left, 1) == 1 && atomic_load(&pool.waiting)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.mutex);
    }
    return 1;
}

/* Parts of one's own shelf, then of the others'. */
static int work(int self) {
    int threads = atomic_load(&pool.threads), any = 0;
    for (int i = 0; i < threads && self < threads; i++)
        while (take(pool.shelf + (self + i) % threads)) any = 1;
    return any;
}

static void *serve(void *self) {
    int64_t known = -1, since = 0;
    for (;;) {
        int64_t latest = atomic_load(&pool.known);
        if (latest != known) known = latest, since = 0;
        if (work((int)(intptr_t)self)) {
            since = 0;
            continue;
        }
        if (!since) since = now();
        if (now() - since < PATIENCE) {
            breathe();
            continue;
        }
        pthread_mutex_lock(&pool.mutex);
        atomic_fetch_add(&pool.sleeping, 1);
        while (atomic_load(&pool.known) == known) pthread_cond_wait(&pool.more, &pool.mutex);
        atomic_fetch_sub(&pool.sleeping, 1);
        pthread_mutex_unlock(&pool.mutex);
    }
    return 0;
}

/* After a fork the child has no threads but the one that forked. */
static void alone(void) {
    pool.made = 0;
    atomic_store(&pool.sleeping, 0), atomic_store(&pool.waiting, 0), atomic_store(&pool.busy, 0), atomic_store(&pool.left, 0);
    for (int i = 0; i < MOST_THREADS; i++) atomic_store(&pool.shelf[i].parts, 0);
    pthread_mutex_init(&pool.mutex, 0), pthread_cond_init(&pool.more, 0), pthread_cond_init(&pool.done, 0);
}

/* As many threads as may be had, up to a number; the caller is one. */
static int hired(int64_t threads) {
    static int told;
    if (!told) pthread_atfork(0, 0, alone), told = 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    while (pool.made + 1 < threads) {
        pthread_t made;
        if (pthread_create(&made, 0, serve, (void *)(intptr_t)(pool.made + 1))) break;
        pthread_detach(made);
        pool.made++;
    }
    return pool.made + 1 < threads ? pool.made + 1 : (int)threads;
}

static void together(int64_t at, const Step *s, int threads) {
    atomic_store(&pool.left, s->parts);
    for (int i = 0; i < threads; i++) atomic_store(&pool.shelf[i].parts, shelf_of(at, share(s->parts, i, threads)));
    atomic_fetch_add(&pool.known, 1);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.more);
        pthread_mutex_unlock(&pool.mutex);
    }
    work(0);
    for (int64_t since = 0; atomic_load(&pool.left);) {
        if (!since) since = now();
        breathe();
        if (now() - since < PATIENCE) continue;
        pthread_mutex_lock(&pool.mutex);
        atomic_store(&pool.waiting, 1);
        while (atomic_load(&pool.left)) pthread_cond_wait(&pool.done, &pool.mutex);
        atomic_store(&pool.waiting, 0);
        pthread_mutex_unlock(&pool.mutex);
    }
}

/* Into how many parts a step is cut for so many threads. */
static int64_t parts_of(const Step *s, int64_t threads) {
    if (threads < 2 || s->nanoseconds < ALONE) return 1;
    int64_t most = s->nanoseconds / LEAST < EACH * threads ? s->nanoseconds / LEAST : EACH * threads;
    most = most < s->units ? most : s->units;
    return most < MOST_PARTS ? most : MOST_PARTS - 1;
}

/* Whether how long a step takes is known: it was timed, or is estimated to be long. */
static int known(const Step *s) { return s->timed >= TIMED || (!s->timed && s->nanoseconds >= LONG); }

/* A step by the caller, timed where that is not known yet. */
static void by_caller(Step *s) {
    int64_t begin = s->units > 1 && !known(s) ? now() : 0;
    s->kernel(s->sizes, s->buffers, 0, 1);
    if (!begin) return;
    int64_t took = now() - begin;
    s->nanoseconds = s->timed && s->nanoseconds < took ? s->nanoseconds : took;
    s->timed++;
}

/* Steps in order by so many threads; by the caller alone where another one's steps are being done. */
void tapestry_run(Step *steps, int64_t count, int64_t threads) {
    int64_t shared = 0;
    for (int64_t i = 0; i < count && threads > 1; i++) {
        Step *s = steps + i;
        s->parts = known(s) ? parts_of(s, threads) : 1;
        shared += s->parts > 1 ? s->nanoseconds : 0;
    }
    int many = shared >= WAKING && count < MOST_STEPS && !atomic_exchange(&pool.busy, 1);
    int hands = many ? hired(threads) : 1;
    if (many) pool.steps = steps, atomic_store(&pool.threads, hands);
    for (int64_t i = 0; i < count; i++) {
        if (hands > 1 && steps[i].parts > 1) together(i, steps + i, hands);
        else by_caller(steps + i);
    }
    if (many) atomic_store(&pool.busy, 0);
}
