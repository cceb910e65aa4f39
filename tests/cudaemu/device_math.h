/* Atomics, arithmetic and conversions that kernels call and NVIDIA's headers define for nvcc only.
 * Rounding of the fast intrinsics (__expf, rsqrtf, ...) is the host's: more exact than a GPU's. */
#ifndef PG_CUDAEMU_DEVICE_MATH_H
#define PG_CUDAEMU_DEVICE_MATH_H

/* ---- atomics: relaxed, as on the device; each returns the old value -------------------------- */
template <class T, class F> static inline T cudaemu_atomic(T *at, F change) {
  T old, next;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  do next = change(old);
  while (!__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
#define CUDAEMU_ATOMIC(name, type, expression)                                                     \
  static inline type name(type *at, type value) {                                                  \
    return cudaemu_atomic(at, [=](type old) -> type { return expression; });                       \
  }
#define CUDAEMU_ATOMIC_NUMBER(type)                                                                \
  CUDAEMU_ATOMIC(atomicAdd, type, old + value)                                                     \
  CUDAEMU_ATOMIC(atomicExch, type, (void(old), value))
#define CUDAEMU_ATOMIC_INTEGER(type)                                                               \
  CUDAEMU_ATOMIC_NUMBER(type)                                                                      \
  CUDAEMU_ATOMIC(atomicMin, type, value < old ? value : old)                                       \
  CUDAEMU_ATOMIC(atomicMax, type, value > old ? value : old)                                       \
  CUDAEMU_ATOMIC(atomicAnd, type, old &value)                                                      \
  CUDAEMU_ATOMIC(atomicOr, type, old | value)                                                      \
  CUDAEMU_ATOMIC(atomicXor, type, old ^ value)                                                     \
  static inline type atomicCAS(type *at, type expected, type value) {                              \
    return cudaemu_atomic(at, [=](type old) { return old == expected ? value : old; });            \
  }
CUDAEMU_ATOMIC_NUMBER(float)
CUDAEMU_ATOMIC_NUMBER(double)
CUDAEMU_ATOMIC_INTEGER(int)
CUDAEMU_ATOMIC_INTEGER(unsigned)
CUDAEMU_ATOMIC_INTEGER(unsigned long long)
CUDAEMU_ATOMIC(atomicMin, long long, value < old ? value : old)
CUDAEMU_ATOMIC(atomicMax, long long, value > old ? value : old)
CUDAEMU_ATOMIC(atomicSub, int, old - value)
CUDAEMU_ATOMIC(atomicSub, unsigned, old - value)
CUDAEMU_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)

/* ---- loads and stores with cache hints --------------------------------------------------------
 */
#define CUDAEMU_LOAD(name)                                                                         \
  template <class T> static inline T name(const T *at) {                                           \
    return *at;                                                                                    \
  }
#define CUDAEMU_STORE(name)                                                                        \
  template <class T> static inline void name(T *at, T value) {                                     \
    *at = value;                                                                                   \
  }
CUDAEMU_LOAD(__ldg)
CUDAEMU_LOAD(__ldcs)
CUDAEMU_LOAD(__ldcg)
CUDAEMU_LOAD(__ldca)
CUDAEMU_STORE(__stcs)
CUDAEMU_STORE(__stcg)
CUDAEMU_STORE(__stwt)

/* ---- minimum and maximum at global scope --------------------------------------------------------
 */
#define CUDAEMU_MINMAX(type)                                                                       \
  static inline type min(type a, type b) {                                                         \
    return b < a ? b : a;                                                                          \
  }                                                                                                \
  static inline type max(type a, type b) {                                                         \
    return a < b ? b : a;                                                                          \
  }
CUDAEMU_MINMAX(int)
CUDAEMU_MINMAX(unsigned)
CUDAEMU_MINMAX(long)
CUDAEMU_MINMAX(unsigned long)
CUDAEMU_MINMAX(long long)
CUDAEMU_MINMAX(unsigned long long)
/* A NaN gives the other operand, as fminf. */
static inline float min(float a, float b) {
  return fminf(a, b);
}
static inline float max(float a, float b) {
  return fmaxf(a, b);
}
static inline double min(double a, double b) {
  return fmin(a, b);
}
static inline double max(double a, double b) {
  return fmax(a, b);
}
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

/* ---- arithmetic: _rn is never contracted into a fused multiply-add ------------------------------
 */
/* glibc declares functions of these names. */
#define __expf cudaemu_expf
#define __exp10f cudaemu_exp10f
#define __logf cudaemu_logf
#define __log2f cudaemu_log2f
#define __log10f cudaemu_log10f
#define __sinf cudaemu_sinf
#define __cosf cudaemu_cosf
#define __tanf cudaemu_tanf
#define __tanhf cudaemu_tanhf
#define __powf cudaemu_powf
#define __sincosf cudaemu_sincosf
#define CUDAEMU_F1(name, type, expression)                                                         \
  static inline type name(type x) {                                                                \
    return expression;                                                                             \
  }
#define CUDAEMU_F2(name, type, expression)                                                         \
  static inline type name(type x, type y) {                                                        \
    return expression;                                                                             \
  }
CUDAEMU_F1(rsqrtf, float, 1.0f / sqrtf(x))
CUDAEMU_F1(rsqrt, double, 1.0 / sqrt(x))
CUDAEMU_F1(__frsqrt_rn, float, (float)(1.0 / sqrt((double)x)))
CUDAEMU_F1(__frcp_rn, float, 1.0f / x)
CUDAEMU_F1(__fsqrt_rn, float, sqrtf(x))
CUDAEMU_F1(__dsqrt_rn, double, sqrt(x))
CUDAEMU_F1(__drcp_rn, double, 1.0 / x)
CUDAEMU_F1(__expf, float, expf(x))
CUDAEMU_F1(__exp10f, float, powf(10.0f, x))
CUDAEMU_F1(__logf, float, logf(x))
CUDAEMU_F1(__log2f, float, log2f(x))
CUDAEMU_F1(__log10f, float, log10f(x))
CUDAEMU_F1(__sinf, float, sinf(x))
CUDAEMU_F1(__cosf, float, cosf(x))
CUDAEMU_F1(__tanf, float, tanf(x))
CUDAEMU_F1(__tanhf, float, tanhf(x))
CUDAEMU_F1(__saturatef, float, fminf(fmaxf(x, 0.0f), 1.0f))
CUDAEMU_F2(__powf, float, powf(x, y))
CUDAEMU_F2(__fdividef, float, x / y)
CUDAEMU_F2(fdividef, float, x / y)
CUDAEMU_F2(__fadd_rn, float, x + y)
CUDAEMU_F2(__fsub_rn, float, x - y)
CUDAEMU_F2(__fmul_rn, float, x *y)
CUDAEMU_F2(__fdiv_rn, float, x / y)
CUDAEMU_F2(__dadd_rn, double, x + y)
CUDAEMU_F2(__dsub_rn, double, x - y)
CUDAEMU_F2(__dmul_rn, double, x *y)
CUDAEMU_F2(__ddiv_rn, double, x / y)
static inline float __fmaf_rn(float x, float y, float z) {
  return fmaf(x, y, z);
}
static inline double __fma_rn(double x, double y, double z) {
  return fma(x, y, z);
}
static inline void __sincosf(float x, float *sine, float *cosine) {
  *sine = sinf(x), *cosine = cosf(x);
}

/* ---- bits and conversions -----------------------------------------------------------------------
 */
template <class To, class From> static inline To cudaemu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
#define CUDAEMU_CONVERT(name, from, to, expression)                                                \
  static inline to name(from x) {                                                                  \
    return expression;                                                                             \
  }
CUDAEMU_CONVERT(__float_as_int, float, int, cudaemu_bits<int>(x))
CUDAEMU_CONVERT(__int_as_float, int, float, cudaemu_bits<float>(x))
CUDAEMU_CONVERT(__float_as_uint, float, unsigned, cudaemu_bits<unsigned>(x))
CUDAEMU_CONVERT(__uint_as_float, unsigned, float, cudaemu_bits<float>(x))
CUDAEMU_CONVERT(__double_as_longlong, double, long long, cudaemu_bits<long long>(x))
CUDAEMU_CONVERT(__longlong_as_double, long long, double, cudaemu_bits<double>(x))
CUDAEMU_CONVERT(__float2int_rn, float, int, (int)rintf(x))
CUDAEMU_CONVERT(__float2int_rz, float, int, (int)x)
CUDAEMU_CONVERT(__float2uint_rz, float, unsigned, (unsigned)x)
CUDAEMU_CONVERT(__int2float_rn, int, float, (float)x)
CUDAEMU_CONVERT(__uint2float_rn, unsigned, float, (float)x)
CUDAEMU_CONVERT(__ll2float_rn, long long, float, (float)x)
CUDAEMU_CONVERT(__ll2double_rn, long long, double, (double)x)
CUDAEMU_CONVERT(__double2float_rn, double, float, (float)x)
CUDAEMU_CONVERT(__popc, unsigned, int, __builtin_popcount(x))
CUDAEMU_CONVERT(__popcll, unsigned long long, int, __builtin_popcountll(x))
CUDAEMU_CONVERT(__clz, int, int, x ? __builtin_clz((unsigned)x) : 32)
CUDAEMU_CONVERT(__clzll, long long, int, x ? __builtin_clzll((unsigned long long)x) : 64)
CUDAEMU_CONVERT(__ffs, int, int, __builtin_ffs(x))
CUDAEMU_CONVERT(__ffsll, long long, int, __builtin_ffsll(x))
static inline unsigned __umulhi(unsigned x, unsigned y) {
  return (unsigned)((unsigned long long)x * y >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}

#endif
