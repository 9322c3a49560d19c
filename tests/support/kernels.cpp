#include <gradsync/kernel/instantiations.hpp>
