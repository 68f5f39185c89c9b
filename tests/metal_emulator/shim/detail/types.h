// Address spaces, scalar and vector types, and the runtime's entry points.
#pragma once
#pragma clang diagnostic ignored "-Wunknown-attributes"
#pragma OPENCL EXTENSION __cl_clang_non_portable_kernel_param_types : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION __cl_clang_variadic_functions : enable
#pragma OPENCL EXTENSION __cl_clang_bitfields : enable

#define __METAL__ 1
#define METAL_FUNC inline
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define half _Float16
#define bfloat __bf16

// OpenCL keywords that MSL leaves free for the kernel author.
#define local local_
#define global global_
#define private private_
#define generic generic_
#define pipe pipe_

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979f
#define M_LN2_F 0.69314718055995f
#define M_SQRT1_2_F 0.70710678118655f
#define M_LOG2E_F 1.44269504088896f

typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t, ptrdiff_t;
typedef unsigned long ulong, uint64_t, size_t;

#define EMULATOR_VECTORS(T, NAME)                        \
  typedef T NAME##2 __attribute__((ext_vector_type(2))); \
  typedef T NAME##3 __attribute__((ext_vector_type(3))); \
  typedef T NAME##4 __attribute__((ext_vector_type(4)));
EMULATOR_VECTORS(char, char)
EMULATOR_VECTORS(uchar, uchar)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, ushort)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, uint)
EMULATOR_VECTORS(long, long)
EMULATOR_VECTORS(ulong, ulong)
EMULATOR_VECTORS(float, float)
// Not through the macro: `half` is itself a macro and would be expanded in NAME.
typedef _Float16 half2 __attribute__((ext_vector_type(2)));
typedef _Float16 half3 __attribute__((ext_vector_type(3)));
typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef __bf16 bfloat2 __attribute__((ext_vector_type(2)));
typedef __bf16 bfloat3 __attribute__((ext_vector_type(3)));
typedef __bf16 bfloat4 __attribute__((ext_vector_type(4)));

// Shim code that touches memory which is not the kernel's own.
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

extern "C" {  // runtime/rt.cpp
void metal_emulator_barrier(int flags);
void metal_emulator_simd_barrier(int flags);
__private char* metal_emulator_exchange(
    const __private void* value, int bytes, __private uint* mask, __private int* lane);
int metal_emulator_lane();
void metal_emulator_bad_lane(int lane);
void metal_emulator_nonfinite(float x);
void metal_emulator_atomic(__private void* p, int bytes, int access);
}
