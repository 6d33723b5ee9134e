#pragma once

// sin and cos for rotations that are applied again and again.

namespace tidegate::kernels {

/// sin and cos within 0.71 units of the last place, where CUDA's sincos errs by up to 1.4 (both
/// measured for angles between -3 and 3): whoever rotates a state by them makes the same error at
/// every step. The angle less a multiple of pi / 2, in two words, then fdlibm's polynomials with
/// what their leading terms round away.
__host__ __device__ inline void exact_sincos(double angle, double* sine, double* cosine) {
  if (!(fabs(angle) < 1e5)) {  // the remainder would need more words
    *sine = sin(angle);
    *cosine = cos(angle);
    return;
  }
  const double turns = rint(angle * 0.63661977236758134308);
  const double first = fma(-turns, 1.57079632679489655800, angle);  // exact
  const double product = turns * 6.12323399573676603587e-17;
  const double x = first - product;
  const double y = (first - x - product) - fma(turns, 6.12323399573676603587e-17, -product);

  const double z = x * x;
  const double z_rest = fma(x, x, -z);
  double s = fma(z, 1.58969099521155010221e-10, -2.50507602534068634195e-08);
  s = fma(z, s, 2.75573137070700676789e-06);
  s = fma(z, s, -1.98412698298579493134e-04);
  s = fma(z, s, 8.33333333332248946124e-03);
  s = fma(z, s, -1.66666666666666324348e-01);
  const double sin_x = x + fma(x * z, s, fma(-0.5 * z, y, y));

  double c = fma(z, -1.13596475577881948265e-11, 2.08757232129817482790e-09);
  c = fma(z, c, -2.75573143513906633035e-07);
  c = fma(z, c, 2.48015872894767294178e-05);
  c = fma(z, c, -1.38888888888741095749e-03);
  c = fma(z, c, 4.16666666666666019037e-02);
  const double top = fma(-0.5, z, 1.0);
  const double top_rest = (1.0 - top) - 0.5 * z;
  const double cos_x = top + (fma(z * z, c, -x * y) + (top_rest - 0.5 * z_rest));

  const int quarter = static_cast<int>(turns) & 3;
  const double a = quarter % 2 == 0 ? sin_x : cos_x;
  const double b = quarter % 2 == 0 ? cos_x : sin_x;
  *sine = quarter >= 2 ? -a : a;
  *cosine = quarter == 1 || quarter == 2 ? -b : b;
}

}  // namespace tidegate::kernels
