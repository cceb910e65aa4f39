/* The golden cases (golden/optimizers.json) and the published program's vectors (REFERENCE A2). */
#include "core/json.h"
#include "optimizer_job.h"

/* ---- golden cases ---------------------------------------------------------------------------- */
static void read_golden(const json_t *array, double *out) {
  size_t i, k, n = 0;
  json_t *row, *x;
  json_array_foreach(array, i, row) json_array_foreach(row, k, x) out[n++] = json_number_value(x);
}

TEST(golden_cases) {
  /* `size`: no element of an increment exceeds size * lr; `roundings`: by how many U of that it is
   * off at most. Rows of length 1 and the like take some 20. Muon's are five steps, each times up
   * to 3.4 in directions that start small; these start at 0.4 and more. Polar Express starts with
   * 8 and 4, and passes 8 * 4 * 20 on at most here. Steps that converge pass on what moves the
   * polar factor of C, at most the error of C over its least singular value: five roundings, three
   * of the mean and two of the centring, and ||C||_F = 69.8 times that value in the first update
   * (10.2 in the second): 70 * 5. Its size there is the nuclear norm, 0.563. Each of SinkGD's ten
   * normalisations at most doubles what the numbers were off by, and adds three roundings. */
  const struct {
    const char *name, *optimizer;
    double lr, weight_decay, size, roundings;
    struct {
      const char *name;
      double value;
    } hypers[4];
  } cases[] = {
      {"adamw_paper", "adamw", 4e-3, 0.1, 1.5, 20, {{0}}},
      {"muon_paper", "muon", 8e-3, 0.1, 1.5, 66, {{0}}},
      {"muon_kj", "muon", 0.02, 0, 1.5, 66, {{"average", 1}, {"eps", 1e-7}}},
      {"muon_moonlight", "muon", 1e-3, 0.1, 1.5, 66, {{"scale", 2}, {"eps", 1e-7}}},
      {"muon_polar_express",
       "muon",
       0.02,
       0,
       1.5,
       500,
       {{"average", 1}, {"coefficients", 1}, {"eps", 1e-6}}},
      {"rownorm_paper_proj_none", "rownorm", 3.2e-3, 0, 1.5, 20, {{0}}},
      {"rownorm_paper_proj_outer", "rownorm", 3.2e-3, 0, 1.5, 20, {{"project", 1}}},
      {"rownorm_paper_proj_both", "rownorm", 3.2e-3, 0, 1.5, 20, {{"project", 2}}},
      {"lion", "lion", 1e-4, 0, 1, 2, {{0}}},
      {"scale_lm_head", "scale", 1e-3, 0, 1.74, 20, {{"beta", 0.9}}},
      {"rmnp", "rmnp", 4e-3, 0, 1.16, 20, {{0}}},
      {"sinkgd_paper", "sinkgd", 1e-3, 0, 2, 3 * 1023, {{0}}},
      {"moga_p2_hidden", "moga", 1e-2, 0.1, 11.6, 20, {{0}}},
      {"scion_spectral_constrained", "scion", 0.01, 1, 15, 66, {{"radius", 10}}},
      {"scion_rownorm_constrained", "scion", 0.01, 1, 5.8, 20, {{"map", 2}, {"radius", 10}}},
      {"modula_embed", "modula", 0.1, 0, 1.74, 20, {{"map", 1}}},
      {"lausu_rownorm_lmhead", "lausu", 5e-3, 0, 1.5, 30, {{"center", 1}}},
      {"lausu_right_polar_lmhead_exact",
       "lausu",
       1e-2,
       0,
       0.57,
       350,
       {{"map", 1}, {"center", 1}, {"steps", 12}}},
  };
  json_t *root = NULL;
  CHECK(pg__json_load(ctx, PG_TEST_DIR "/golden/optimizers.json", 0, &root) == 0, "%s",
        pg_context_message(ctx));
  if (!root) return;
  for (size_t c = 0; c < PG_COUNT(cases); c++) {
    job j = job_new(cases[c].optimizer, 1, 4, 3);
    json_t *golden = json_object_get(json_object_get(root, "cases"), cases[c].name);
    double x[12];
    set(&j, "lr", cases[c].lr);
    if (strcmp(cases[c].optimizer, "muon") != 0 || c == 1)
      CHECK(get(&j, "weight_decay", 0) == cases[c].weight_decay, "the default is the paper's");
    set(&j, "weight_decay", cases[c].weight_decay);
    for (size_t k = 0; k < 4 && cases[c].hypers[k].name; k++)
      set(&j, cases[c].hypers[k].name, cases[c].hypers[k].value);
    read_golden(json_object_get(root, "W0"), x);
    write_doubles(j.w[0], x);
    for (int n = 1; n <= 2; n++) {
      read_golden(json_object_get(root, n == 1 ? "G1" : "G2"), x);
      write_doubles(j.g[0], x);
      increment(&j, cases[c].lr);
      apply(&j, cases[c].lr);
      read_golden(json_object_get(golden, n == 1 ? "W1" : "W2"), x);
      /* |w| starts at 0.2; the start and each update round it three times. */
      double step = cases[c].lr * cases[c].size;
      double bar = ((0.2 + step * n) * (1 + 3 * n) + step * n * cases[c].roundings) * U;
      check_matrix(cases[c].name, j.w[0], x, bar);
    }
    job_free(&j);
  }
  json_decref(root);
}

/* The published program's own test vectors (REFERENCE A2). W and G are small integers, exact in
 * fp32; W stays below 8, so that three roundings per update are 3 * 8 U at most. */
static const double W0[8] = {1, 3, 2, -1, -4, 2, 5, -2};

TEST(published_rownorm) {
  const double g[2][8] = {{1, 2, 2, -1, -3, 4, 5, -2}, {-2, 3, 4, 2, 1, -5, 3, 1}};
  const double s[2][8] = {
      {-.08561394699397955, -.1712278939879591, -.1712278939879591, .08561394699397955,
       .11764705882352944, -.15686274509803924, -.1823099278073303, .07292397112293211},
      {.06103956406255134, -.18311869218765398, -.18755078273993198, -.05049444150690477,
       .055549882875831826, .18053711934645342, -.19469986698392155, .0064899955661307145}};
  const double w[2][8] = {
      {.8543860530060204, 2.6487721060120406, 1.7087721060120409, -.8543860530060204,
       -3.6423529411764703, 1.7231372549019606, 4.517690072192669, -1.8070760288770678},
      {.8641624538882104, 2.3067270874636643, 1.4186949969113862, -.8536173313325639,
       -3.3682618818300503, 1.8002861389542961, 4.051928800877186, -1.6921614715783129}};
  const double buffer[8] = {-.56, 1.68, 2.08, .56, -.32, -1.04, 2.4, -.08};
  job j = job_new("rownorm", 1, 4, 2);
  set(&j, "lr", .2);
  set(&j, "beta", .6);
  set(&j, "eps", .1);
  set(&j, "weight_decay", .3);
  write_doubles(j.w[0], W0);
  for (int n = 0; n < 2; n++) {
    write_doubles(j.g[0], g[n]);
    increment(&j, .2);
    apply(&j, .2);
    check_matrix("step", j.s[0], s[n], .2 * 12 * U);
    check_matrix("weights", j.w[0], w[n], 24 * (n + 1) * U);
  }
  check_matrix("buffer", j.slots[0][0], buffer, 3.2 * 6 * U);
  /* No gradient and no momentum: the weights shrink, the step is exactly 0. */
  const double zero[8] = {0};
  write_doubles(j.g[0], zero);
  write_doubles(j.slots[0][0], zero);
  increment(&j, .2);
  check_matrix("zero step", j.s[0], zero, 0);
  job_free(&j);
}

TEST(published_rownorm_tiny_rows) {
  /* The buffer as it stands at update 3 (c = .142625); beta would only halve it again, so the
   * gradient is chosen equal to the buffer. */
  const double b[6] = {3, 4, 1e-10, -2e-10, 0, 0};
  const double s[6] = {
      .59999999982885, .7999999997717999, .06061132101669471, -.12122264203338942, 0, 0};
  job j = job_new("rownorm", 1, 3, 2);
  set(&j, "lr", 1);
  write_doubles(j.g[0], b);
  write_doubles(j.slots[0][0], b);
  j.updates[0] = 2;
  increment(&j, -1); /* lr -1 gives the normalised rows themselves */
  check_matrix("tiny rows", j.s[0], s, 10 * U);
  float *f = read_floats(j.s[0]);
  CHECK(f[4] == 0 && f[5] == 0, "a zero row stays zero");
  free(f);
  job_free(&j);
}

TEST(published_adamw) {
  const double g[2][8] = {{1, 2, 2, -3, -1, 4, 3, 1}, {.5, -2, 3, 1, 2, -1, -4, 2}};
  const double w[2][8] = {
      {.7400199980001999, 2.620009999500025, 1.6800099995000248, -.7400066664444518,
       -3.5600199980002, 1.680004999875003, 4.500006666444451, -2.0799800019998},
      {.5236502458033829, 2.5485193997442983, 1.3731689305384562, -.6818191314324812,
       -3.483877220746035, 1.547209741889248, 4.340444647018115, -2.1613688358185827}};
  job j = job_new("adamw", 1, 4, 2);
  set(&j, "lr", .2);
  j.hypers[1] = .4;
  j.hypers[2] = .7;
  set(&j, "eps", 1e-4);
  set(&j, "weight_decay", .3);
  write_doubles(j.w[0], W0);
  for (int n = 0; n < 2; n++) {
    write_doubles(j.g[0], g[n]);
    increment(&j, .2);
    apply(&j, .2);
    check_matrix("weights", j.w[0], w[n], 24 * (n + 1) * U);
  }
  job_free(&j);
  /* Zero gradients at scale .25: weights times 1 - .25 lr wd. */
  j = job_new("adamw", 1, 4, 2);
  set(&j, "weight_decay", .3);
  double shrunk[8];
  for (int i = 0; i < 8; i++) shrunk[i] = W0[i] * (1 - .25 * .2 * .3);
  write_doubles(j.w[0], W0);
  increment(&j, .25 * .2);
  apply(&j, .25 * .2);
  check_matrix("shrunk", j.w[0], shrunk, 8 * 2 * U);
  job_free(&j);
}

TEST(published_muon) {
  const double g[2][4] = {{3, 0, 0, 4}, {0, 2, 1, 0}}, buffer[4] = {1.5, 2, 1, 2};
  const double w[2][4] = {
      {-.1047213595499958, -.0596284793999944, -.0298142396999972, -.13962847939999443},
      {-.08095290887308736, -.08381163549234938, -.04190581774617469, -.10793721183078314}};
  for (int nesterov = 0; nesterov < 2; nesterov++) {
    job j = job_new("muon", 1, 2, 2);
    set(&j, "momentum", .5);
    set(&j, "nesterov", nesterov);
    set(&j, "steps", 0);
    set(&j, "eps", 0);
    set(&j, "weight_decay", 0);
    for (int n = 0; n < 2; n++) {
      write_doubles(j.g[0], g[n]);
      increment(&j, .1);
      apply(&j, .1);
    }
    check_matrix("muon without steps", j.w[0], w[nesterov], .15 * 12 * U);
    check_matrix("buffer", j.slots[0][0], buffer, 0);
    job_free(&j);
  }
  /* Shape scale sqrt(4/2). */
  job j = job_new("muon", 1, 4, 2);
  set(&j, "momentum", 0);
  set(&j, "steps", 0);
  set(&j, "eps", 0);
  double x[15], s[15];
  for (int i = 0; i < 8; i++) {
    x[i] = i + 1;
    s[i] = -(i + 1) * sqrt(2) / sqrt(204);
  }
  CHECK_CLOSE(s[0], -.09901475429766743, 1e-15);
  write_doubles(j.g[0], x);
  increment(&j, 1);
  check_matrix("shape scale", j.s[0], s, 8 * U);
  job_free(&j);
  /* Five steps; lr -1 gives the orthogonalised matrix itself. */
  const double five[4] = {-.6806599844395556, .8255398969672965, .7412962395767622,
                          .2594416974868796};
  j = job_new("muon", 1, 2, 2);
  set(&j, "momentum", 0);
  write_doubles(j.g[0], (const double[]){1, 2, 3, 4});
  increment(&j, -1);
  /* The small singular value starts at .067 and is multiplied some hundredfold: 100 * 5 U. */
  check_matrix("five steps", j.s[0], five, 500 * U);
  job_free(&j);
  /* Two steps on a 5 x 3 matrix of rank 2; first row published. S carries sqrt(5/3). */
  j = job_new("muon", 1, 5, 3);
  set(&j, "momentum", 0);
  set(&j, "steps", 2);
  set(&j, "eps", 1e-6);
  for (int i = 0; i < 15; i++) x[i] = i;
  write_doubles(j.g[0], x);
  increment(&j, -1 / sqrt(5.0 / 3));
  float *f = read_floats(j.s[0]);
  const double row[3] = {-.3046173823301855, .015081132292306523, .33477964691479867};
  for (int i = 0; i < 3; i++)
    CHECK(fabs(f[i] - row[i]) <= 60 * U, "two steps [%d]: off by %g", i, fabs(f[i] - row[i]));
  free(f);
  job_free(&j);
  /* The scalar map of five steps, on 1 x 1 matrices with eps = g (1/x - 1), so that X0 = x. */
  const double map[][2] = {{1e-3, .47054395121553977}, {.01, .6989170633216859},
                           {.1, .7121200816580746},    {.3, 1.0795922928997004},
                           {.5, .7654385304543396},    {.7, 1.1203226304932925},
                           {1, .6964364094697522}};
  for (size_t i = 0; i < PG_COUNT(map); i++) {
    j = job_new("muon", 1, 1, 1);
    set(&j, "momentum", 0);
    set(&j, "eps", 1 / map[i][0] - 1);
    write_doubles(j.g[0], (const double[]){1});
    increment(&j, -1);
    /* x is off by 2 U relative, and the map's relative condition x f'/f is below 40 here. */
    check_matrix("scalar map", j.s[0], &map[i][1], 100 * U);
    job_free(&j);
  }
}

int main(void) {
  if (job_start() < 0) return 1;
  RUN(golden_cases);
  RUN(published_rownorm);
  RUN(published_rownorm_tiny_rows);
  RUN(published_adamw);
  RUN(published_muon);
  return job_end();
}
