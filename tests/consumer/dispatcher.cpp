// Finds an op by name. The linker would drop a library that no symbol of this program comes from.
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdio>

int main() {
  auto op = c10::Dispatcher::singleton().findSchema({"tidegate::hgru", ""});
  std::puts(op ? "found tidegate::hgru" : "tidegate::hgru is not registered");
  return op ? 0 : 1;
}
