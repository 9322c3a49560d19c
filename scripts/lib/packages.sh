# SPDX-License-Identifier: BSL-1.0
# Sourced by the scripts: install_packages PACKAGE... installs with apt what is missing.
#
# It sets `download_seconds`. COMMAND=PACKAGE stands for "the package, unless the command is there already, wherever it came from".

install_packages() {
    local item missing=()
    download_seconds=0
    for item in "$@"; do
        case $item in
            *=*) command -v "${item%%=*}" >/dev/null || missing+=("${item#*=}") ;;
            *) package_installed "$item" || missing+=("$item") ;;
        esac
    done
    [ ${#missing[@]} -eq 0 ] && return

    if ! command -v apt-get >/dev/null; then
        echo "No apt-get here. If the build fails, install what these Debian packages hold: ${missing[*]}" >&2
        return
    fi
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "Missing packages: ${missing[*]}. Install them as root, or install sudo." >&2
            return 1
        fi
        as_root=(sudo)
    fi
    echo "Installing with apt: ${missing[*]}"
    local start=$SECONDS
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes
        apt-get install --yes --no-install-recommends -qq "${missing[@]}")
    if ! "${install[@]}" --download-only >/dev/null 2>&1; then  # the package lists at hand are missing or old
        retry "${as_root[@]}" apt-get update -qq || return
        retry "${install[@]}" --download-only >/dev/null || return
    fi
    download_seconds=$((SECONDS - start))
    retry "${install[@]}" >/dev/null
}

# The same of those that not every release has: what needs them does without where they are not to be had.
install_known_packages() {
    local item
    for item in "$@"; do
        if apt-cache show "$item" >/dev/null 2>&1; then install_packages "$item"; fi
    done
}

# Packages of PyPI into build/python, for tests that do without them where they are not to be had.
install_python_packages() {
    local item
    for item in "$@"; do
        compgen -G "build/python/${item/==/-}*.dist-info" >/dev/null && continue
        python3 -m pip install --quiet --no-deps --upgrade --target build/python "$item" >/dev/null 2>&1 ||
            echo "Without Python's package $item, which pip cannot install here" >&2
    done
}

# The headers and host libraries of PyPI's newest PyTorch into build/torch, for tests that are left out where it cannot be had. The wheel is
# 0.5 GB. Nothing of its CUDA is kept: empty libraries stand in for those that the host libraries load.
install_torch() {
    [ -e build/torch/lib/version ] && return
    local folder=build/torch name
    rm -rf $folder && mkdir -p $folder
    if ! { python3 -m pip download --quiet --no-deps --only-binary :all: --dest $folder torch &&
        python3 - $folder; } >$folder.log 2>&1 <<'END'; then
import glob, shutil, sys, zipfile
folder = sys.argv[1]
wheel = glob.glob(folder + "/torch-*.whl")[0]
libraries = ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [n for n in archive.namelist() if n.startswith("torch/include/") or n in libraries])
for part in ("include", "lib"):
    shutil.move(f"{folder}/torch/{part}", folder)
with open(f"{folder}/version", "w") as file:
    file.write(wheel.split("-")[1] + "\n")
END
        echo "Without PyTorch of PyPI, which pip cannot download here (build/torch.log): the adapter is tested with Debian's, if at all" >&2
        rm -rf $folder
        return
    fi
    rm -rf $folder/*.whl $folder/torch
    for name in $(readelf -d $folder/lib/libtorch_cpu.so | sed -n 's/.*NEEDED.*\[\(libcu[^]]*\)\]/\1/p'); do
        "${CXX:-c++}" -shared -x c++ /dev/null -Wl,-soname,"$name" -o "$folder/lib/$name"
    done
    mv $folder/version $folder/lib/version  # last: all is there
}

# libensmallen-dev, or where the release has no such package, as Debian 12, the headers of Debian 13's in build/ensmallen.
install_ensmallen() {
    local folder=$PWD/build/ensmallen
    install_known_packages libensmallen-dev
    if package_installed libensmallen-dev || [ -d "$folder/usr" ]; then return; fi
    rm -rf "$folder" && mkdir -p "$folder"/{lists,cache/archives}/partial
    local mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$folder/sources"
    local apt=(apt-get -o Dir::Etc::sourcelist="$folder/sources" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$folder/lists"
        -o Dir::Cache="$folder/cache")
    (cd "$folder" && "${apt[@]}" update -qq && "${apt[@]}" download -qq libensmallen-dev && dpkg -x ./*.deb .) >"$folder.log" 2>&1 ||
        echo "Without ensmallen, which apt cannot download here (build/ensmallen.log): its program is not built" >&2
}

package_installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Three times, with a pause: mirrors and networks have bad moments.
retry() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return
        [ "$attempt" -eq 3 ] || { echo "'$*' failed, trying again in 10 s" >&2; sleep 10; }
    done
    return 1
}

# The packages that every preset needs; that the trainer needs; that MPI needs; that scripts/test needs beyond the first and MPI's; and that
# scripts/test --all needs beyond all of them: a second compiler with its sanitizers, Eigen, etcd, and what draws and compares benchmarks.
build_packages=(c++=g++ cmake=cmake ninja=ninja-build)
trainer_packages=(pkg-config=pkgconf libopenblas-dev libcli11-dev nlohmann-json3-dev)
mpi_packages=(libopenmpi-dev openmpi-bin libboost-mpi-dev)
test_packages=(doctest-dev ccache=ccache python3=python3 "${mpi_packages[@]}")
extra_test_packages=(python3-pip python3-yaml libbenchmark-dev libeigen3-dev clang++=clang libclang-rt-dev llvm libc++-dev gnuplot=gnuplot-nox spin
    python3-matplotlib python3-pandas python3-scipy ip=iproute2 etcd=etcd-server libcurl4-openssl-dev curl openssl)
