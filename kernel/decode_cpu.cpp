// One decoding step of a dense model on a CPU, in float32: a token each of B sequences through all layers, one call.
//
// Written operation by operation, a step of a small model is some 200 calls of PyTorch that cost more than their work.
// Here threads meet five times a layer. Weights are read where the model has them, row by row; keys and values lie in
// the engine's pages, (pages, page_size, K, D) a layer. Every sum has one order, whatever the batch and the threads, so
// a sequence's numbers do not depend on its company. kernel/decode_cpu.py builds it and says what the pointers are.
// Letters: B sequences, C d_model, F d_ff, H heads, K kv heads, D head_dim, V scores; N rows of a weight.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));

#ifdef __clang__
#define PICK4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t i4 __attribute__((vector_size(16)));
#define PICK4(a, b, i, j, k, l) __builtin_shuffle(a, b, (i4){i, j, k, l})
#endif

static inline v8 load(const float* p) { return *(const v8*)p; }
static inline void store(float* p, v8 x) { *(v8*)p = x; }
static inline v8 all(float x) { return (v8){x, x, x, x, x, x, x, x}; }
static inline v4 halves(v8 x) { return (v4){x[0], x[1], x[2], x[3]} + (v4){x[4], x[5], x[6], x[7]}; }

// The sum of eight lanes, in the order that sum4 has too.
static inline float sum(v8 x) {
    v4 t = halves(x);
    return (t[0] + t[2]) + (t[1] + t[3]);
}

static inline v4 sum4(v8 a, v8 b, v8 c, v8 d) {
    v4 ta = halves(a), tb = halves(b), tc = halves(c), td = halves(d);
    v4 ab = PICK4(ta, tb, 0, 1, 4, 5) + PICK4(ta, tb, 2, 3, 6, 7);
    v4 cd = PICK4(tc, td, 0, 1, 4, 5) + PICK4(tc, td, 2, 3, 6, 7);
    return PICK4(ab, cd, 0, 2, 4, 6) + PICK4(ab, cd, 1, 3, 5, 7);
}

static inline v8 lower(v8 x, v8 bound) { return bound < x ? bound : x; }  // what is not a number stays so
static inline v8 higher(v8 x, v8 bound) { return bound > x ? bound : x; }

// e^x to about one unit in the last place between -87 and 88, which is where x is cut (Cephes' polynomial).
static inline v8 exponential(v8 x) {
    x = higher(lower(x, all(88.0f)), all(-87.0f));
    v8 turns = x * 1.44269504088896341f + all(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
    v8 n = turns - all(12582912.0f);
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i8 power = (__builtin_convertvector(n, i8) + 127) << 23;
    v8 scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// ---- products: y[b][n] of rows n of w (N, width) and rows b of x (B, width)

struct Rows {
    const float* x;
    int64_t count, width;  // B, and the stride of rows
};

// R rows of w with M rows of x; `put(b, n, value)` takes each product.
template <int R, int M, class Put>
static inline void tile(const float* w, int64_t n, Rows in, int64_t b, Put put) {
    const int64_t width = in.width;
    v8 acc[R][M];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) acc[r][m] = all(0.0f);
    const float *wn = w + n * width, *xb = in.x + b * width;
    for (int64_t i = 0; i < width; i += 8) {
        v8 x[M];
        for (int m = 0; m < M; m++) x[m] = load(xb + m * width + i);
        for (int r = 0; r < R; r++) {
            v8 weights = load(wn + r * width + i);
            for (int m = 0; m < M; m++) acc[r][m] += weights * x[m];
        }
    }
    for (int m = 0; m < M; m++) {
        int r = 0;
        for (; r + 4 <= R; r += 4) {
            v4 sums = sum4(acc[r][m], acc[r + 1][m], acc[r + 2][m], acc[r + 3][m]);
            for (int j = 0; j < 4; j++) put(b + m, n + r + j, sums[j]);
        }
        for (; r < R; r++) put(b + m, n + r, sum(acc[r][m]));
    }
}

template <int R, class Put>
static inline void rows_of_x(const float* w, int64_t n, Rows in, Put put) {
    int64_t b = 0;
    for (; in.count - b > 4 || in.count - b == 3; b += 3) tile<R, 3>(w, n, in, b, put);
    for (; b + 2 <= in.count; b += 2) tile<R, 2>(w, n, in, b, put);
    if (b < in.count) tile<R, 1>(w, n, in, b, put);
}

template <class Put>
static void product(const float* w, int64_t begin, int64_t end, Rows in, Put put) {
    int64_t n = begin;
    if (in.count == 1)  // eight streams keep the load units busy
        for (; n + 8 <= end; n += 8) tile<8, 1>(w, n, in, 0, put);
    for (; n + 4 <= end; n += 4) rows_of_x<4>(w, n, in, put);
    for (; n < end; n++) rows_of_x<1>(w, n, in, put);
}

// ---- what lies between them

static void normalise(const float* x, const float* weight, float eps, int64_t width, float* out) {
    v8 squares = all(0.0f);
    for (int64_t i = 0; i < width; i += 8) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += 8) store(out + i, load(x + i) * scale * load(weight + i));
}

static void turn(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

struct Pages {
    float *keys, *values;
    const int32_t* table;  // of this sequence
    int64_t page_size, stride;  // stride: K * D, of tokens
    int64_t place(int64_t s) const { return (table[s / page_size] * page_size + s % page_size) * stride; }
};

// Ask for the rows of the four tokens that are eight further on: a cache larger than L2 is read a sixth faster.
static inline void ask_ahead(const float* row, int64_t stride) {
    for (int64_t i = 0; i < 4 * stride; i += 16) __builtin_prefetch(row + 8 * stride + i);
}

// Query heads that share a pass over a sequence's pages: those of kv heads first .. end, `group` to each.
struct Heads {
    const float* q;  // (count(), D)
    int64_t first, end, group, D;
    int64_t count() const { return (end - first) * group; }
};

// scores[i * stride + s] of each query head i and token s, by four tokens: all heads while their rows are near. Up to
// three scores past the end are written too.
static void score(Heads heads, Pages pages, int64_t length, float* scores, int64_t stride) {
    const int64_t D = heads.D;
    const float scale = 1.0f / std::sqrt((float)D);
    for (int64_t s = 0; s < length;) {
        const float* row = pages.keys + pages.place(s) + heads.first * D;
        int64_t left = pages.page_size - s % pages.page_size, offsets[4];  // tokens of this page
        left = left < length - s ? left : length - s;
        ask_ahead(row, pages.stride);
        for (int64_t j = 0; j < 4; j++) offsets[j] = (j < left ? j : left - 1) * pages.stride;
        for (int64_t i = 0; i < heads.count(); i++) {
            const float *q = heads.q + i * D, *k = row + i / heads.group * D;
            v8 acc[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
            for (int64_t d = 0; d < D; d += 8) {
                v8 part = load(q + d);
                for (int j = 0; j < 4; j++) acc[j] += part * load(k + offsets[j] + d);
            }
            *(v4*)(scores + i * stride + s) = sum4(acc[0], acc[1], acc[2], acc[3]) * scale;
        }
        s += left < 4 ? left : 4;
    }
}

// e^(score - largest) in place, and their sum; eight floats past the end are free.
static float exponentials(float* scores, int64_t length) {
    for (int64_t s = length; s < length + 8; s++) scores[s] = -1e30f;  // e^-87 each at most
    v8 tops = load(scores);
    for (int64_t s = 8; s < length; s += 8) tops = higher(tops, load(scores + s));
    float top = tops[0];
    for (int j = 1; j < 8; j++) top = tops[j] > top ? tops[j] : top;
    v8 sums = all(0.0f);
    for (int64_t s = 0; s < length; s += 8) {
        v8 weights = exponential(load(scores + s) - all(top));
        store(scores + s, weights);
        sums += weights;
    }
    return sum(sums);
}

// out[i] += the weights of TOKENS tokens, their values from `row` on, for each query head i.
template <int TOKENS>
static inline void add_values(Heads heads, const float* weights, int64_t stride, const float* row, int64_t apart,
                              float* out) {
    const int64_t D = heads.D;
    for (int64_t i = 0; i < heads.count(); i++) {
        const float *v = row + i / heads.group * D, *w = weights + i * stride;
        for (int64_t d = 0; d < D; d += 8) {
            v8 acc = load(out + i * D + d);
            for (int j = 0; j < TOKENS; j++) acc += all(w[j]) * load(v + j * apart + d);
            store(out + i * D + d, acc);
        }
    }
}

// softmax(q k^T / sqrt(D)) v over `length` tokens -> out (heads.count(), D); scores (heads.count(), stride).
static void attend(Heads heads, Pages pages, int64_t length, float* scores, int64_t stride, float* out) {
    const int64_t D = heads.D;
    score(heads, pages, length, scores, stride);
    std::memset(out, 0, heads.count() * D * sizeof(float));
    float totals[heads.count()];
    for (int64_t i = 0; i < heads.count(); i++) totals[i] = exponentials(scores + i * stride, length);
    for (int64_t s = 0; s < length;) {
        const float* row = pages.values + pages.place(s) + heads.first * D;
        int64_t left = pages.page_size - s % pages.page_size;
        left = left < length - s ? left : length - s;
        for (; left >= 4; left -= 4, s += 4, row += 4 * pages.stride) {
            ask_ahead(row, pages.stride);
            add_values<4>(heads, scores + s, stride, row, pages.stride, out);
        }
        for (; left > 0; left--, s++, row += pages.stride)
            add_values<1>(heads, scores + s, stride, row, pages.stride, out);
    }
    for (int64_t i = 0; i < heads.count(); i++)
        for (int64_t d = 0; d < D; d += 8) store(out + i * D + d, load(out + i * D + d) / all(totals[i]));
}

// ---- the step

struct Sizes {  // kernel.decode_cpu.Sizes
    int64_t layers, C, F, H, K, D, V, page_size, columns, longest, threads;
    double eps;
};

struct Layer {  // kernel.decode_cpu.LAYER_POINTERS
    const float *attention_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o;
    const float *ffn_norm, *gate, *up, *down;
    float *keys, *values;
};

struct Model {  // kernel.decode_cpu.MODEL_POINTERS
    const float *embedding, *norm, *output, *cos, *sin;
    const int32_t* tables;
    int64_t* last_tokens;
};

struct Step {
    int64_t B;
    const int64_t *slots, *lengths;
    float *stream, *qkv, *attended, *hidden;  // (B, C), (B, (H + 2K) D), (B, H D), (B, F)
};

// Where the part of thread `part` of `threads` begins among `count` rows, in eights.
static inline int64_t cut(int64_t count, int64_t part, int64_t threads) {
    const int64_t begin = (count + 7) / 8 * part / threads * 8;
    return begin < count ? begin : count;
}

static void project_qkv(const Sizes& z, const Layer& l, const Step& s, const float* normed, int64_t part) {
    const float *weights[3] = {l.q, l.k, l.v}, *biases[3] = {l.q_bias, l.k_bias, l.v_bias};
    const int64_t width = (z.H + 2 * z.K) * z.D, firsts[4] = {0, z.H * z.D, (z.H + z.K) * z.D, width};
    const int64_t begin = cut(width, part, z.threads), end = cut(width, part + 1, z.threads);
    for (int i = 0; i < 3; i++) {
        const int64_t from = begin > firsts[i] ? begin : firsts[i], to = end < firsts[i + 1] ? end : firsts[i + 1];
        const float* bias = biases[i];
        float* out = s.qkv + firsts[i];
        product(weights[i], from - firsts[i], to - firsts[i], {normed, s.B, z.C}, [&](int64_t b, int64_t n, float y) {
            out[b * width + n] = bias ? y + bias[n] : y;
        });
    }
}

// kv heads first .. end of sequence b: their keys and values into the pages, then the query heads that read them.
static void attend_heads(const Sizes& z, const Model& m, const Layer& l, const Step& s, int64_t b, int64_t first,
                         int64_t end, float* scores) {
    const int64_t D = z.D, group = z.H / z.K, position = s.lengths[b] - 1, half = D / 2;
    const float *cos = m.cos + position * half, *sin = m.sin + position * half;
    float *row = s.qkv + b * (z.H + 2 * z.K) * D, *queries = row + first * group * D;
    const Pages pages = {l.keys, l.values, m.tables + s.slots[b] * z.columns, z.page_size, z.K * D};
    const int64_t place = pages.place(position);
    for (int64_t head = first; head < end; head++) {
        float *k = row + (z.H + head) * D, *v = k + z.K * D;
        if (l.k_norm) normalise(k, l.k_norm, (float)z.eps, D, k);
        turn(k, cos, sin, half);
        std::memcpy(pages.keys + place + head * D, k, D * sizeof(float));
        std::memcpy(pages.values + place + head * D, v, D * sizeof(float));
    }
    for (float* q = queries; q < row + end * group * D; q += D) {
        if (l.q_norm) normalise(q, l.q_norm, (float)z.eps, D, q);
        turn(q, cos, sin, half);
    }
    const Heads heads = {queries, first, end, group, D};
    attend(heads, pages, position + 1, scores, z.longest + 16, s.attended + (b * z.H + first * group) * D);
}

// This thread's share of the kv heads of all sequences.
static void attend_share(const Sizes& z, const Model& m, const Layer& l, const Step& s, int64_t part, float* scores) {
    const int64_t begin = s.B * z.K * part / z.threads, end = s.B * z.K * (part + 1) / z.threads;
    for (int64_t task = begin; task < end;) {
        const int64_t b = task / z.K, last = end < (b + 1) * z.K ? end : (b + 1) * z.K;
        attend_heads(z, m, l, s, b, task - b * z.K, last - b * z.K, scores);
        task = last;
    }
}

static void activate(const Sizes& z, const Layer& l, const Step& s, const float* normed, int64_t part, float* gates) {
    const int64_t begin = cut(z.F, part, z.threads), end = cut(z.F, part + 1, z.threads), F = z.F;
    const Rows in = {normed, s.B, z.C};
    product(l.gate, begin, end, in, [&](int64_t b, int64_t n, float y) { gates[b * F + n] = y; });
    product(l.up, begin, end, in, [&](int64_t b, int64_t n, float y) { s.hidden[b * F + n] = y; });
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t n = b * F + begin; n < b * F + end; n += 8) {
            const v8 gate = load(gates + n);
            store(s.hidden + n, gate / (all(1.0f) + exponential(-gate)) * load(s.hidden + n));
        }
}

static void add_product(const Sizes& z, const Step& s, const float* w, const float* x, int64_t width, int64_t part) {
    const int64_t begin = cut(z.C, part, z.threads), end = cut(z.C, part + 1, z.threads), C = z.C;
    product(w, begin, end, {x, s.B, width}, [&](int64_t b, int64_t n, float y) { s.stream[b * C + n] += y; });
}

static void normalise_rows(const Sizes& z, const Step& s, const float* weight, float* normed) {
    for (int64_t b = 0; b < s.B; b++) normalise(s.stream + b * z.C, weight, (float)z.eps, z.C, normed + b * z.C);
}

// ---- the next token

static int64_t likeliest(const float* scores, int64_t V) {
    int64_t best = 0;
    for (int64_t n = 1; n < V; n++) best = scores[n] > scores[best] ? n : best;
    return best;
}

// e^((score - top) / temperature) of every score, in eights (next to nothing past the end), and their sum by 64.
static double weigh_scores(const float* scores, int64_t V, float top, float temperature, float* weights) {
    double total = 0.0;
    for (int64_t first = 0; first < V; first += 64) {
        const int64_t end = first + 64 < V ? first + 64 : V;
        v8 sums = all(0.0f);
        for (int64_t n = first; n < end; n += 8) {
            v8 x = all(-INFINITY);
            std::memcpy(&x, scores + n, (end - n < 8 ? end - n : 8) * sizeof(float));
            v8 weight = exponential(x / all(temperature) - all(top / temperature));
            store(weights + n, weight);
            sums += weight;
        }
        total += (double)sum(sums);
    }
    return total;
}

// The first token up to which the weights exceed `target`; the last one if rounding leaves none.
static int64_t draw(const float* weights, int64_t V, double target) {
    double before = 0.0;
    for (int64_t first = 0; first < V; first += 64) {
        v8 sums = all(0.0f);
        for (int64_t n = first; n < V && n < first + 64; n += 8) sums += load(weights + n);
        const double block = (double)sum(sums);
        const bool last = first + 64 >= V;
        if (before + block <= target && !last) {
            before += block;
            continue;
        }
        const int64_t end = last ? V : first + 64;
        for (int64_t n = first; n < end; n++)
            if ((before += (double)weights[n]) > target) return n;
        return end - 1;
    }
    return V - 1;
}

struct Outputs {  // kernel.decode_cpu.Outputs; of rows b, with packed null where nothing is chosen
    float* scores;  // (B, V)
    double* packed;  // (B, 3): id, log-probability, kept mass
    float* norms;  // (B,): log of the sum of e^(score / temperature)
    const double* uniforms;
    const float* temperatures;  // 0 for the likeliest, whose log-probability is at temperature 1
    float* scratch;
};

static void choose(const Sizes& z, const Outputs& to, int64_t b, int64_t* last_token, float* weights) {
    const float *scores = to.scores + b * z.V, asked = to.temperatures[b], temperature = asked == 0.0f ? 1.0f : asked;
    int64_t chosen = likeliest(scores, z.V);
    const float top = scores[chosen];
    const double total = weigh_scores(scores, z.V, top, temperature, weights);
    if (asked != 0.0f) chosen = draw(weights, z.V, to.uniforms[b] * total);
    const double log_norm = (double)(top / temperature) + std::log(total);
    double* packed = to.packed + 3 * b;
    packed[0] = (double)chosen, packed[1] = (double)(scores[chosen] / temperature) - log_norm, packed[2] = 1.0;
    to.norms[b] = (float)log_norm;
    *last_token = chosen;
}

static int64_t thread_floats(const Sizes& z, int64_t B) {  // normed, gates, attention's scores, weights of the scores
    return B * (z.C + z.F) + z.H * (z.longest + 16) + z.V + 8;
}

// ---- what Python calls

extern "C" int64_t scratch_floats(const Sizes* z, int64_t B) {
    return B * (z->C + (z->H + 2 * z->K) * z->D + z->H * z->D + z->F) + z->threads * thread_floats(*z, B);
}

extern "C" void decode(const Sizes* sizes, const Model* model, const Layer* layers, const int64_t* slots,
                       const int64_t* lengths, int64_t B, const Outputs* outputs) {
    Sizes z = *sizes;
    const Model& m = *model;
    const Outputs& to = *outputs;
    Step s = {B, slots, lengths, to.scratch, nullptr, nullptr, nullptr};
    s.qkv = s.stream + B * z.C;
    s.attended = s.qkv + B * (z.H + 2 * z.K) * z.D;
    s.hidden = s.attended + B * z.H * z.D;
    float* threads_own = s.hidden + B * z.F;
#pragma omp parallel num_threads(z.threads) if (z.threads > 1) firstprivate(z)
    {
        const int64_t part = omp_get_thread_num();
        z.threads = omp_get_num_threads();  // no more than was asked for
        float* normed = threads_own + part * thread_floats(z, B);
        float *gates = normed + B * z.C, *scores = gates + B * z.F;
        for (int64_t b = part; b < B; b += z.threads)
            std::memcpy(s.stream + b * z.C, m.embedding + m.last_tokens[slots[b]] * z.C, z.C * sizeof(float));
#pragma omp barrier
        for (const Layer* l = layers; l < layers + z.layers; l++) {
            normalise_rows(z, s, l->attention_norm, normed);
            project_qkv(z, *l, s, normed, part);
#pragma omp barrier
            attend_share(z, m, *l, s, part, scores);
#pragma omp barrier
            add_product(z, s, l->o, s.attended, z.H * z.D, part);
#pragma omp barrier
            normalise_rows(z, s, l->ffn_norm, normed);
            activate(z, *l, s, normed, part, gates);
#pragma omp barrier
            add_product(z, s, l->down, s.hidden, z.F, part);
#pragma omp barrier
        }
        normalise_rows(z, s, m.norm, normed);
        product(m.output, cut(z.V, part, z.threads), cut(z.V, part + 1, z.threads), {normed, B, z.C},
                [&](int64_t b, int64_t n, float y) { to.scores[b * z.V + n] = y; });
        if (to.packed) {
#pragma omp barrier
            float* weights = scores + z.H * (z.longest + 16);
            for (int64_t b = part; b < B; b += z.threads) choose(z, to, b, m.last_tokens + slots[b], weights);
        }
    }
}
