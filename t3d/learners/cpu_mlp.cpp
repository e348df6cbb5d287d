// [steps 2 and 3] `networks.mlp` for processors with 512-bit vectors: a whole network with two hidden layers at once.
//
// Every product is one routine, `product`: it keeps 14 x 32 sums in registers while it walks along the third axis, and
// adds biases, cuts at zero or masks before a sum is ever stored. Rows of the batch are divided among threads, a
// network to a thread where there are enough of them, so what one layer leaves in a core's cache the next one finds
// there. No sum is divided, so results do not depend on the number of threads.
//
// What is multiplied is made of 32-bit units: in fp32 a number, in bf16 a pair of neighbours along the third axis,
// which a processor multiplies and adds up at once. `processors.py` calls this, and says what the shapes are.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <immintrin.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#ifdef __GNUC__
#pragma GCC optimize("tree-loop-vectorize")  // which PyTorch's compiler turns off: it writes its vectors out
#endif

namespace {

using at::Tensor;

struct Fp32 {
  using Unit = float;
  static __m512 broadcast(float a) { return _mm512_set1_ps(a); }
  static __m512 load(__mmask16 mask, const float* b) { return _mm512_maskz_loadu_ps(mask, b); }
  static __m512 add(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
};

#ifdef __AVX512BF16__
struct Bf16 {
  using Unit = uint32_t;
  static __m512i broadcast(uint32_t a) { return _mm512_set1_epi32(a); }
  static __m512i load(__mmask16 mask, const uint32_t* b) { return _mm512_maskz_loadu_epi32(mask, b); }
  static __m512 add(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// What happens to a sum before it is stored. `mask` is as large as the result and lies like it.
struct Finish {
  const float* bias = nullptr;
  const float* mask = nullptr;
  bool relu = false;
};

// ROWS x (16 VECTORS) sums of c = a b; of the last vector the columns in `last` alone.
template <class P, int ROWS, int VECTORS>
void tile(long depth, const typename P::Unit* a, long a_row, long a_step, const typename P::Unit* b, long b_step,
          float* c, long c_row, __mmask16 last, const Finish& finish) {
  __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int v = 0; v < VECTORS; v++) {
    const __mmask16 mask = v == VECTORS - 1 ? last : 0xffff;
    const __m512 first = finish.bias ? _mm512_maskz_loadu_ps(mask, finish.bias + 16 * v) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) sum[i][v] = first;
  }
  for (long k = 0; k < depth; k++) {
    decltype(P::load(last, b)) right[VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) right[v] = P::load(v == VECTORS - 1 ? last : 0xffff, b + k * b_step + 16 * v);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const auto left = P::broadcast(a[i * a_row + k * a_step]);
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) sum[i][v] = P::add(sum[i][v], left, right[v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
      const __mmask16 mask = v == VECTORS - 1 ? last : 0xffff;
      __m512 x = sum[i][v];
      if (finish.relu) x = _mm512_max_ps(_mm512_setzero_ps(), x);  // in this order: what is not a number stays none
      if (finish.mask) {
        const __m512 on = _mm512_maskz_loadu_ps(mask, finish.mask + i * c_row + 16 * v);
        x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(on, _mm512_setzero_ps(), _CMP_NLE_UQ), x);
      }
      _mm512_mask_storeu_ps(c + i * c_row + 16 * v, mask, x);
    }
  }
}

template <class P, int ROWS, int VECTORS>
long down(long i, long rows, long depth, const typename P::Unit* a, long a_row, long a_step, const typename P::Unit* b,
          long b_step, float* c, long c_row, __mmask16 last, Finish finish) {
  const float* mask = finish.mask;
  for (; i + ROWS <= rows; i += ROWS) {
    finish.mask = mask ? mask + i * c_row : nullptr;
    tile<P, ROWS, VECTORS>(depth, a + i * a_row, a_row, a_step, b, b_step, c + i * c_row, c_row, last, finish);
  }
  return i;
}

// c (rows x columns) = a (rows x depth) b (depth x columns), `depth` counted in units.
template <class P>
void product(long rows, long columns, long depth, const typename P::Unit* a, long a_row, long a_step,
             const typename P::Unit* b, long b_step, float* c, long c_row, const Finish& finish = {}) {
  for (long j = 0; j < columns;) {
    const bool wide = j + 32 <= columns;
    const long left = std::min(16L, columns - j);
    const __mmask16 last = wide ? 0xffff : (__mmask16)((1u << left) - 1);
    Finish here = finish;
    if (here.bias) here.bias += j;
    if (here.mask) here.mask += j;
    long i = 0;
#define T3D_DOWN(ROWS)                                                                                   \
  i = wide ? down<P, ROWS, 2>(i, rows, depth, a, a_row, a_step, b + j, b_step, c + j, c_row, last, here) \
           : down<P, ROWS, 1>(i, rows, depth, a, a_row, a_step, b + j, b_step, c + j, c_row, last, here);
    T3D_DOWN(14)
    T3D_DOWN(8) T3D_DOWN(4) T3D_DOWN(2) T3D_DOWN(1)
#undef T3D_DOWN
        j += wide ? 32 : left;
  }
}

// out (16 x 16) = in (16 x 16) turned over: neighbours change places, then pairs, then fours, then eights.
void turn_block(const float* in, long in_row, float* out, long out_row) {
  __m512 x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_ps(in + i * in_row);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) { return (__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); };
  const auto high = [](__m512 a, __m512 b) { return (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); };
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    x[i] = low(y[i], y[i + 2]);
    x[i + 1] = high(y[i], y[i + 2]);
    x[i + 2] = low(y[i + 1], y[i + 3]);
    x[i + 3] = high(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    const int from = i / 8 * 8 + i % 4;
    y[i] =
        i / 4 % 2 ? _mm512_shuffle_f32x4(x[from], x[from + 4], 0xdd) : _mm512_shuffle_f32x4(x[from], x[from + 4], 0x88);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    const __m512 a = y[i % 8], b = y[i % 8 + 8];
    _mm512_storeu_ps(out + i * out_row, i / 8 ? _mm512_shuffle_f32x4(a, b, 0xdd) : _mm512_shuffle_f32x4(a, b, 0x88));
  }
}

// out (columns x rows) = in (rows x columns)
void transpose(const float* in, long rows, long columns, float* out) {
  const long whole_rows = rows / 16 * 16, whole_columns = columns / 16 * 16;
  for (long i = 0; i < whole_rows; i += 16)
    for (long j = 0; j < whole_columns; j += 16) turn_block(in + i * columns + j, columns, out + j * rows + i, rows);
  for (long i = 0; i < rows; i++)
    for (long j = i < whole_rows ? whole_columns : 0; j < columns; j++) out[j * rows + i] = in[i * columns + j];
}

// A place of its thread's own, one for each SLOT, that is there from call to call.
template <int SLOT>
float* place(long size) {
  static thread_local std::vector<float> there;
  if ((long)there.size() < size) there.resize(size);
  return there.data();
}

// A matrix as units: where it lies, or a copy in a place of its own.
template <class P>
struct Units {
  const typename P::Unit* data;
  long depth;  // of the axis that is summed over
};

// Units along the rows (depth x columns), or along the columns (rows x depth).
template <int SLOT>
Units<Fp32> along_rows(Fp32, const float* x, long rows, long) {
  return {x, rows};
}
template <int SLOT>
Units<Fp32> along_columns(Fp32, const float* x, long, long columns) {
  return {x, columns};
}

#ifdef __AVX512BF16__
inline uint32_t rounded(float x) {  // to bfloat16, to the nearest, ties to even; in the upper half
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
}

template <int SLOT>
Units<Bf16> along_rows(Bf16, const float* x, long rows, long columns) {
  const long depth = (rows + 1) / 2;
  uint32_t* units = (uint32_t*)place<SLOT>(depth * columns);
  for (long r = 0; r < rows; r += 2) {
    const float *a = x + r * columns, *b = a + columns;
    uint32_t* out = units + r / 2 * columns;
    if (r + 1 < rows)
#pragma omp simd
      for (long j = 0; j < columns; j++) out[j] = rounded(a[j]) >> 16 | rounded(b[j]);
    else
      for (long j = 0; j < columns; j++) out[j] = rounded(a[j]) >> 16;
  }
  return {units, depth};
}

template <int SLOT>
Units<Bf16> along_columns(Bf16, const float* x, long rows, long columns) {
  const long depth = (columns + 1) / 2;
  uint32_t* units = (uint32_t*)place<SLOT>(rows * depth);
  for (long r = 0; r < rows; r++) {
    const float* in = x + r * columns;
    uint32_t* out = units + r * depth;
#pragma omp simd
    for (long j = 0; j < columns / 2; j++) out[j] = rounded(in[2 * j]) >> 16 | rounded(in[2 * j + 1]);
    if (columns % 2) out[columns / 2] = rounded(in[columns - 1]) >> 16;
  }
  return {units, depth};
}
#endif

// The transpose of a matrix, its units along what were its columns. Turning over is moving, whatever the units are.
template <class P, int SLOT>
Units<P> transposed(const float* x, long rows, long columns) {
  const auto units = along_columns<SLOT>(P(), x, rows, columns);
  float* out = place<SLOT + 1>(rows * units.depth);
  transpose((const float*)units.data, rows, units.depth, out);
  return {(const typename P::Unit*)out, units.depth};
}

// T x S networks, whose weights may be a part of those of more seeds, and the sizes of their layers.
struct Nets {
  const bool twins;
  const long seeds, count, batch, in, one, two, out;

  Nets(const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& w3)
      : twins(w1.dim() == 4),
        seeds(w1.size(-3)),
        count(twins ? w1.size(0) * seeds : seeds),
        batch(x.size(-2)),
        in(w1.size(-2)),
        one(w1.size(-1)),
        two(w2.size(-1)),
        out(w3.size(-1)) {}

  const float* weights(const Tensor& w, long net) const {
    return w.const_data_ptr<float>() + (twins ? net / seeds * w.stride(0) : 0) + net % seeds * w.stride(-3);
  }
  Tensor empty(long rows, long columns, bool any, const Tensor& like) const {
    std::vector<int64_t> shape{count / seeds, seeds, rows, columns};
    if (!twins) shape.erase(shape.begin());
    return at::empty(any ? shape : std::vector<int64_t>{0}, like.options());
  }
};

// work(net, part, parts) for every network, on all threads; each network in as many parts as keep them all busy.
template <class F>
void share(long nets, F work) {
  const long threads = omp_get_max_threads(), parts = threads / std::gcd(nets, threads);
#pragma omp parallel for schedule(static)
  for (long task = 0; task < nets * parts; task++) work(task / parts, task % parts, parts);
}

// Where the part-th of several parts of `size` begins.
long begin(long size, long part, long parts) { return size * part / parts; }

template <class P>
void forward(const Nets& n, const float* x, const Tensor (&w)[3], const Tensor (&b)[3], float* y, float* h1,
             float* h2) {
  share(n.count, [&](long net, long part, long parts) {
    const long first = begin(n.batch, part, parts), rows = begin(n.batch, part + 1, parts) - first;
    const float *w1 = n.weights(w[0], net), *w2 = n.weights(w[1], net), *w3 = n.weights(w[2], net);
    const long own = net * n.batch + first;
    float* one = h1 ? h1 + own * n.one : place<0>(rows * n.one);
    float* two = h2 ? h2 + own * n.two : place<1>(rows * n.two);

    auto left = along_columns<2>(P(), x + (net % n.seeds * n.batch + first) * n.in, rows, n.in);
    auto right = along_rows<3>(P(), w1, n.in, n.one);
    product<P>(rows, n.one, left.depth, left.data, left.depth, 1, right.data, n.one, one, n.one,
               {n.weights(b[0], net), nullptr, true});
    left = along_columns<2>(P(), one, rows, n.one);
    right = along_rows<3>(P(), w2, n.one, n.two);
    product<P>(rows, n.two, left.depth, left.data, left.depth, 1, right.data, n.two, two, n.two,
               {n.weights(b[1], net), nullptr, true});
    const float* b3 = n.weights(b[2], net);
    if (n.out == 1) {
      for (long r = 0; r < rows; r++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < n.two; j++) sum += two[r * n.two + j] * w3[j];
        y[own + r] = sum + b3[0];
      }
    } else {
      product<Fp32>(rows, n.out, n.two, two, n.two, 1, w3, n.out, y + own * n.out, n.out, {b3});
    }
  });
}

// d2 and d1, what the hidden layers are to change, and dx if there is room for it.
template <class P>
void backward(const Nets& n, const float* dy, const float* h1, const float* h2, const Tensor (&w)[3], float* d1,
              float* d2, float* dx) {
  share(n.count, [&](long net, long part, long parts) {
    const long first = begin(n.batch, part, parts), rows = begin(n.batch, part + 1, parts) - first;
    const float *w1 = n.weights(w[0], net), *w2 = n.weights(w[1], net), *w3 = n.weights(w[2], net);
    const long own = net * n.batch + first;
    float *one = d1 + own * n.one, *two = d2 + own * n.two;
    const float *on1 = h1 + own * n.one, *on2 = h2 + own * n.two, *change = dy + own * n.out;
    const auto last = transposed<Fp32, 3>(w3, n.two, n.out);
    product<Fp32>(rows, n.two, n.out, change, n.out, 1, last.data, n.two, two, n.two, {nullptr, on2});
    auto left = along_columns<2>(P(), two, rows, n.two);
    auto right = transposed<P, 3>(w2, n.one, n.two);
    product<P>(rows, n.one, left.depth, left.data, left.depth, 1, right.data, n.one, one, n.one, {nullptr, on1});
    if (dx) {
      left = along_columns<2>(P(), one, rows, n.one);
      right = transposed<P, 3>(w1, n.in, n.one);
      product<P>(rows, n.in, left.depth, left.data, left.depth, 1, right.data, n.in, dx + own * n.in, n.in);
    }
  });
}

// Some columns of x (rows x columns), each row times its factor if there is one, added up.
void add_up(const float* x, long rows, long columns, const float* factor, long first, long last, float* out) {
  std::fill(out + first, out + last, 0.0f);
  for (long r = 0; r < rows; r++) {
    const float times = factor ? factor[r] : 1.0f;
#pragma omp simd
    for (long j = first; j < last; j++) out[j] += times * x[r * columns + j];
  }
}

template <class P>
void weights(const Nets& n, const float* x, const float* h1, const float* h2, const float* d1, const float* d2,
             const float* dy, float* const (&w)[3], float* const (&b)[3]) {
  share(n.count, [&](long net, long part, long parts) {
    const float* seen = x + net % n.seeds * n.batch * n.in;
    const float *one = h1 + net * n.batch * n.one, *two = h2 + net * n.batch * n.two, *dy_ = dy + net * n.batch * n.out;
    const float *d_one = d1 + net * n.batch * n.one, *d_two = d2 + net * n.batch * n.two;
    const long first1 = begin(n.one, part, parts), last1 = begin(n.one, part + 1, parts);
    const long first2 = begin(n.two, part, parts), last2 = begin(n.two, part + 1, parts);

    auto left = along_rows<2>(P(), one, n.batch, n.one), right = along_rows<3>(P(), d_two, n.batch, n.two);
    product<P>(last1 - first1, n.two, left.depth, left.data + first1, 1, n.one, right.data, n.two,
               w[1] + (net * n.one + first1) * n.two, n.two);
    left = along_rows<2>(P(), seen, n.batch, n.in);
    right = along_rows<3>(P(), d_one, n.batch, n.one);
    product<P>(n.in, last1 - first1, left.depth, left.data, 1, n.in, right.data + first1, n.one,
               w[0] + net * n.in * n.one + first1, n.one);
    if (n.out == 1)
      add_up(two, n.batch, n.two, dy_, first2, last2, w[2] + net * n.two);
    else
      product<Fp32>(last2 - first2, n.out, n.batch, two + first2, 1, n.two, dy_, n.out,
                    w[2] + (net * n.two + first2) * n.out, n.out);
    add_up(d_one, n.batch, n.one, nullptr, first1, last1, b[0] + net * n.one);
    add_up(d_two, n.batch, n.two, nullptr, first2, last2, b[1] + net * n.two);
    if (part == 0) add_up(dy_, n.batch, n.out, nullptr, 0, n.out, b[2] + net * n.out);
  });
}

template <class F>
void in_precision(bool bf16, F work) {
#ifdef __AVX512BF16__
  if (bf16) return work(Bf16());
#endif
  TORCH_CHECK(!bf16, "this processor has no bfloat16");
  work(Fp32());
}

const float* read(const Tensor& x) { return x.const_data_ptr<float>(); }
float* write(const Tensor& x) { return x.numel() ? x.mutable_data_ptr<float>() : nullptr; }

std::tuple<Tensor, Tensor, Tensor> run_forward(const Tensor& given, const Tensor& w1, const Tensor& b1,
                                               const Tensor& w2, const Tensor& b2, const Tensor& w3, const Tensor& b3,
                                               bool bf16, bool keep) {
  const Tensor x = given.contiguous();
  const Nets n(x, w1, w2, w3);
  const Tensor y = n.empty(n.batch, n.out, true, x);
  const Tensor h1 = n.empty(n.batch, n.one, keep, x), h2 = n.empty(n.batch, n.two, keep, x);
  in_precision(bf16, [&](auto precision) {
    forward<decltype(precision)>(n, read(x), {w1, w2, w3}, {b1, b2, b3}, write(y), write(h1), write(h2));
  });
  return {y, h1, h2};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients run_backward(const Tensor& given, const Tensor& dy_given, const Tensor& h1, const Tensor& h2,
                       const Tensor& w1, const Tensor& w2, const Tensor& w3, bool bf16, bool into, bool of_weights) {
  const Tensor x = given.contiguous(), dy = dy_given.contiguous();
  const Nets n(x, w1, w2, w3);
  const auto empty = [&](long rows, long columns, bool any) { return n.empty(rows, columns, any, x); };
  const Tensor d1 = at::empty_like(h1), d2 = at::empty_like(h2);
  const Tensor dx = empty(n.batch, n.in, into);
  const Tensor g1 = empty(n.in, n.one, of_weights), g2 = empty(n.one, n.two, of_weights),
               g3 = empty(n.two, n.out, of_weights);
  const Tensor c1 = empty(1, n.one, of_weights), c2 = empty(1, n.two, of_weights), c3 = empty(1, n.out, of_weights);
  in_precision(bf16, [&](auto precision) {
    using P = decltype(precision);
    backward<P>(n, read(dy), read(h1), read(h2), {w1, w2, w3}, write(d1), write(d2), write(dx));
    if (of_weights)
      weights<P>(n, read(x), read(h1), read(h2), read(d1), read(d2), read(dy), {write(g1), write(g2), write(g3)},
                 {write(c1), write(c2), write(c3)});
  });
  return {dx, g1, c1, g2, c2, g3, c3};
}

}  // namespace

TORCH_LIBRARY(t3d_cpu_mlp, library) {
  library.def(
      "forward(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor w3, Tensor b3, bool bf16, bool keep)"
      " -> (Tensor, Tensor, Tensor)");
  library.def(
      "backward(Tensor x, Tensor dy, Tensor h1, Tensor h2, Tensor w1, Tensor w2, Tensor w3, bool bf16, bool into,"
      " bool of_weights) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(t3d_cpu_mlp, CPU, library) {
  library.impl("forward", run_forward);
  library.impl("backward", run_backward);
}
