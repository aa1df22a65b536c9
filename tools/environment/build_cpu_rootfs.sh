#!/usr/bin/env bash
# Builds the Dockerfile's image for CPUs where no registry of images is reached, and runs the demo's first stage in it.
#
#   tools/environment/build_cpu_rootfs.sh FOLDER        (as root; needs debootstrap and buildah, 7 GB, five minutes)
#
# Debian's packages make the base image, so its digest is not the Dockerfile's. Further arguments go to `buildah build`,
# such as -v /etc/pip.conf:/etc/pip.conf:ro.
set -euo pipefail

folder=${1:?error: name a folder for the images}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
for program in debootstrap buildah; do
    command -v "$program" >/dev/null || { echo "error: $program is missing; on Debian: apt-get install $program" >&2; exit 2; }
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

images() { buildah --root "$folder/images" --runroot "$folder/run" --storage-driver vfs "$@"; }

[[ -d $folder/base/etc ]] || debootstrap --variant=minbase bookworm "$folder/base"
printf 'FROM scratch\nCOPY . /\n' | images build --isolation chroot -t localhost/debian -f - "$folder/base"
images build --isolation chroot --build-arg CPU_IMAGE=localhost/debian --target cpu -t localhost/rlhf-megatron \
    "$@" -f "$root/tools/environment/Dockerfile" "$root"
container=$(images from localhost/rlhf-megatron)
trap 'images rm "$container" >/dev/null' EXIT
# shellcheck disable=SC2016
images run --isolation chroot "$container" -- bash -euc '
    echo "user $(id -u), folder $PWD"
    rlhf-megatron tiny-model --output model
    ls model/config.json'
